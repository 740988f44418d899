// The decision log against its documentation: docs/gate.md lists every event with all of its fields and every reason,
// and a record has those fields and no others.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "tests/gate/simulator.h"

namespace gradgate::gate {
namespace {

using Names = std::set<std::string>;

/// The section "The decision log" of docs/gate.md.
std::string documentation() {
  std::ifstream file(GRADGATE_SOURCE_DIR "/docs/gate.md");
  const std::string page{std::istreambuf_iterator<char>(file), {}};
  const size_t begin = page.find("\n## The decision log"), end = page.find("\n## ", begin + 1);
  return begin == std::string::npos ? "" : page.substr(begin, end - begin);
}

/// All names in backticks. What stands in brackets explains the name before it.
Names names_in(const std::string& text) {
  const std::string bare = std::regex_replace(text, std::regex("\\([^()]*\\)"), "");
  static const std::regex kName("`([a-z_0-9]+)`");
  Names names;
  for (std::sregex_iterator it(bare.begin(), bare.end(), kName), end; it != end; ++it) names.insert((*it)[1]);
  return names;
}

/// Event → fields, as documented; those that every record has are left out.
std::map<std::string, Names> documented_events() {
  std::map<std::string, Names> events;
  const std::string text = documentation();
  static const std::regex kRow("\n\\| `([a-z]+)` \\| [^|]*\\|([^\n]*)\\|(?=\n)");
  for (std::sregex_iterator it(text.begin(), text.end(), kRow), end; it != end; ++it)
    events[(*it)[1]] = names_in((*it)[2]);
  return events;
}

/// Lives that between them have every event.
std::vector<std::string> every_kind_of_line() {
  std::vector<std::string> all;
  const auto add = [&](const Simulation& sim) { all.insert(all.end(), sim.logs[0].begin(), sim.logs[0].end()); };
  {  // opens and holds; the link becomes fast: drift
    Simulation sim(World{}, {});
    sim.run(300);
    sim.world.link = {0.5e-6, 100e9};
    sim.world.compute_s = 5e-3;
    sim.run(200);
    add(sim);
  }
  {  // the codec fails
    Simulation sim(World{}, {});
    sim.run(100);
    sim.codec(1).fails = true;
    sim.run(40);
    add(sim);
  }
  {  // a check has to wait for tokens, then the account falls; the guard looked in between
    GateConfig config;
    config.token_fraction = 0;
    Simulation sim(World{}, config);
    for (int step = 0; step < 200; ++step) {
      if (sim.gates[0].plan(0).guard)
        for (Gate& gate : sim.gates) gate.record_guard(0, {1e-4, 1, 1e-4, 1, 1, 1, 0, 0, 7});
      if (step == 74) sim.world.compute_s = 55e-3;
      sim.step();
    }
    sim.codec(1).hidden_s = 45e-3;
    sim.run(400);
    add(sim);
  }
  {
    GateConfig config;
    config.mode = Mode::observe;
    Simulation sim(World{}, config);
    sim.run(120);
    add(sim);
  }
  const LogSink sink{&all, [](void* context, const char* line, size_t size) {
                       static_cast<std::vector<std::string>*>(context)->emplace_back(line, size);
                     }};
  log_link(sink, "probe", link_model({5e-6, 50e9}, 4), nullptr);
  return all;
}

TEST(GateLogSchema, EveryRecordHasTheDocumentedFieldsAndNoOthers) {
  const std::map<std::string, Names> documented = documented_events();
  ASSERT_EQ(documented.size(), 13u) << "the table of events in docs/gate.md was not understood";
  const Names reasons = names_in(documentation());
  Names seen;
  for (const std::string& line : every_kind_of_line()) {
    const auto record = nlohmann::json::parse(line);
    const std::string event = record.at("event");
    ASSERT_TRUE(documented.contains(event)) << line;
    Names expected = documented.at(event);
    expected.insert({"v", "event"});
    if (event != "link") expected.insert({"step", "epoch"});
    Names fields;
    for (const auto& [key, value] : record.items()) fields.insert(key);
    ASSERT_EQ(fields, expected) << line;
    if (record.contains("why")) {
      EXPECT_TRUE(reasons.contains(record["why"].get<std::string>())) << line;
    }
    seen.insert(event);
  }
  for (const auto& [event, fields] : documented) EXPECT_TRUE(seen.contains(event)) << event << " was not produced";
}

TEST(GateLogSchema, EveryReasonIsDocumented) {
  const Names reasons = names_in(documentation());
  for (int i = 0; i < kWhyCount; ++i)
    EXPECT_TRUE(reasons.contains(why_name(static_cast<Why>(i)))) << why_name(static_cast<Why>(i));
}

}  // namespace
}  // namespace gradgate::gate
