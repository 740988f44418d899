// Agreement between ranks, modes, saved state and the log.
#include <gtest/gtest.h>

#include <clocale>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/gate/simulator.h"

namespace gradgate::gate {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Runs start-up on `costs.size()` ranks that measured different codec times for each bucket (encode + decode, seconds)
// while T(M) − T(M/r) is `gain`; returns the gates after the first agreement and their logs.
struct Disagreement {
  std::vector<Gate> gates;
  std::vector<std::string> logs;

  Disagreement(const std::vector<std::vector<double>>& costs, double gain) {
    const size_t ranks = costs.size(), buckets = costs[0].size();
    GateConfig config;
    config.ranks = static_cast<uint32_t>(ranks);
    CandidateInfo int8;
    std::strcpy(int8.name, "int8");
    int8.exchange = Exchange::all_reduce;  // so that shadow times count once
    const std::vector<BucketInfo> infos(buckets, BucketInfo{4e6, {1e6}});
    LinkModel link;  // dense: 4 gain/3, a quarter of it: gain/3
    link.ranks = config.ranks;
    link.all_reduce = link.all_gather = link.all_to_all = {0, gain / 3e6};
    gates.resize(ranks);
    logs.resize(ranks);
    for (size_t r = 0; r < ranks; ++r) {
      EXPECT_TRUE(Gate::create(config, {&int8, 1}, infos, &gates[r]).ok());
      gates[r].set_log({&logs[r], [](void* context, const char* line, size_t size) {
                          static_cast<std::string*>(context)->append(line, size).append("\n");
                        }});
    }
    gates[0].set_link(link);
    while (!gates[0].agreement_due()) {
      for (size_t r = 0; r < ranks; ++r) {
        for (size_t b = 0; b < buckets; ++b) {
          Sample dense;
          dense.transfer_s = gain * 4 / 3;
          gates[r].record(b, dense);
          if (gates[r].plan(b).shadow < 0) continue;
          Sample shadow;
          shadow.candidate = 1, shadow.shadow = true;
          shadow.encode_s = shadow.decode_s = costs[r][b] / 2;
          gates[r].record(b, shadow);
        }
        gates[r].end_step(10e-3);
      }
    }
    agree();
  }
  void agree() {
    const size_t n = gates[0].report_size();
    std::vector<double> reports(gates.size() * n), message(gates[0].message_size());
    for (size_t r = 0; r < gates.size(); ++r) {
      ASSERT_TRUE(gates[r].agreement_due());
      ASSERT_TRUE(gates[r].write_report(std::span(reports).subspan(r * n, n)).ok());
    }
    ASSERT_TRUE(gates[0].decide(reports, message).ok());
    for (Gate& gate : gates) ASSERT_TRUE(gate.apply(message).ok());
  }
  bool opens(size_t rank, size_t bucket) const { return gates[rank].plan(bucket).action == Action::compress; }
};

TEST(GateAgreement, SlowestRankDecidesForAll) {
  const Disagreement off({{1.00e-3}, {1.20e-3}}, 1.10e-3);  // mean 1.10, max 1.20
  EXPECT_FALSE(off.opens(0, 0));
  EXPECT_FALSE(off.opens(1, 0));
  const Disagreement on({{0.90e-3}, {1.00e-3}}, 1.10e-3);
  EXPECT_TRUE(on.opens(0, 0));
  EXPECT_TRUE(on.opens(1, 0));
}

TEST(GateAgreement, TwoHundredNoisyBucketsAreDecidedAlike) {
  for (const size_t ranks : {2u, 3u, 8u}) {
    uint64_t random = 1;
    std::vector<std::vector<double>> costs(ranks, std::vector<double>(200));
    for (auto& rank : costs) {
      for (double& cost : rank) {
        random = random * 6364136223846793005ull + 1442695040888963407ull;
        cost = 1e-3 * (0.7 + 0.6 * static_cast<double>(random >> 11) / 9007199254740992.0);
      }
    }
    const Disagreement all(costs, 1.10e-3);
    int open = 0;
    for (size_t b = 0; b < 200; ++b) {
      double slowest = 0;
      for (const auto& rank : costs) slowest = std::max(slowest, rank[b]);
      for (size_t r = 0; r < ranks; ++r)
        EXPECT_EQ(all.opens(r, b), slowest < 1.10e-3) << "bucket " << b << " rank " << r;
      open += all.opens(0, b);
    }
    EXPECT_GT(open, 0);
    EXPECT_LT(open, 200);
    for (size_t r = 1; r < ranks; ++r) EXPECT_EQ(all.logs[r], all.logs[0]);
    EXPECT_GT(all.logs[0].size(), 200u * 50);
  }
}

TEST(GateAgreement, ContradictingReportsAreAnErrorOnEveryRank) {
  World w;
  Simulation sim(w, {});
  Simulation other(w, {});
  for (int i = 0; i < 10; ++i) {
    for (Gate& gate : sim.gates) gate.end_step(1e-2);
    other.gates[0].end_step(1e-2);
  }
  other.gates[0].end_step(1e-2);  // one step ahead
  const size_t n = sim.gates[0].report_size();
  std::vector<double> reports(4 * n), message(sim.gates[0].message_size());
  for (int r = 0; r < 3; ++r) ASSERT_TRUE(sim.gates[r].write_report(std::span(reports).subspan(r * n, n)).ok());
  ASSERT_TRUE(other.gates[0].write_report(std::span(reports).subspan(3 * n, n)).ok());
  EXPECT_EQ(sim.gates[0].decide(reports, message).code(), StatusCode::peer_mismatch);
  for (Gate& gate : sim.gates) EXPECT_EQ(gate.apply(message).code(), StatusCode::peer_mismatch);
  EXPECT_EQ(sim.gates[0].decide(std::span(reports).first(n), message).code(), StatusCode::invalid_argument);
}

TEST(GateAgreement, DamagedMessagesAreRefused) {
  Simulation sim(World{}, {});
  for (int i = 0; i < 10; ++i) {
    for (Gate& gate : sim.gates) gate.end_step(1e-2);
  }
  const size_t n = sim.gates[0].report_size();
  std::vector<double> reports(4 * n), message(sim.gates[0].message_size());
  for (int r = 0; r < 4; ++r) ASSERT_TRUE(sim.gates[r].write_report(std::span(reports).subspan(r * n, n)).ok());
  ASSERT_TRUE(sim.gates[0].decide(reports, message).ok());
  int refused = 0;
  for (size_t i = 0; i < message.size(); ++i) {
    for (const double bad : {-1.0, 0.5, 77.0, 1e300, kNaN}) {
      std::vector<double> damaged = message;
      damaged[i] = bad;
      Simulation fresh(World{}, {});
      for (int s = 0; s < 10; ++s) fresh.gates[1].end_step(1e-2);
      if (!fresh.gates[1].apply(damaged).ok()) {
        ++refused;
        EXPECT_STREQ(fresh.gates[1].phase_name(), "startup") << "unchanged";
      }
      EXPECT_LE(fresh.gates[1].running(0), 1);
      EXPECT_LE(fresh.gates[1].plan(0).candidate, 1);
      fresh.gates[1].explain(0), fresh.gates[1].end_step(1e-2);
    }
  }
  EXPECT_GT(refused, static_cast<int>(2 * message.size()));
  EXPECT_EQ(sim.gates[1].apply(std::span(message).first(message.size() - 1)).code(), StatusCode::bad_payload);
  ASSERT_TRUE(sim.gates[1].apply(message).ok());
  EXPECT_EQ(sim.gates[1].apply(message).code(), StatusCode::bad_payload) << "twice";
  sim.gates[2].end_step(1e-2);
  EXPECT_EQ(sim.gates[2].apply(message).code(), StatusCode::bad_payload) << "a step too late";
}

TEST(GateModes, ObserveNeverChangesAnAction) {
  GateConfig config;
  config.mode = Mode::observe;
  World w;
  w.noise = 0.02;
  Simulation sim(w, config);
  sim.run(400);
  EXPECT_EQ(sim.count(0, Action::dense), 400);
  EXPECT_EQ(sim.agreements, 1);
  ASSERT_EQ(sim.lines("observe", "\"label\":\"predicted\"").size(), 1u);
  const auto verdict = nlohmann::json::parse(sim.lines("observe")[0]);
  EXPECT_EQ(verdict.at("step"), 100);
  // Dense 68 ms against 37 ms.
  EXPECT_NEAR(verdict.at("tolerable_inflation").get<double>(), 0.93, 0.15);
  EXPECT_EQ(sim.gates[0].decision(0).chosen, 1);
  EXPECT_NE(std::string(sim.gates[0].explain(0).text).find("predicted"), std::string::npos);
  EXPECT_NE(std::string(sim.gates[0].explain_plan().text).find("predicted"), std::string::npos);
}

TEST(GateModes, OnRunsTheFirstCandidateWithoutMeasuring) {
  GateConfig config;
  config.mode = Mode::on;
  Simulation sim(World{}, config);
  sim.run(100);
  EXPECT_EQ(sim.count(0, Action::compress), 100);
  EXPECT_EQ(sim.agreements, 3);  // for the guard, every 32 steps
  EXPECT_EQ(sim.total_shadow_s, 0);
  EXPECT_EQ(sim.gates[0].decision(0).why, Why::mode_on);
}

TEST(GateModes, OffAndOneRankAreDense) {
  GateConfig off;
  off.mode = Mode::off;
  World alone;
  alone.ranks = 1;
  for (auto& [world, config, why] : std::vector<std::tuple<World, GateConfig, Why>>{
           {World{}, off, Why::mode_off}, {alone, GateConfig{}, Why::single_rank}, {alone, off, Why::single_rank}}) {
    Simulation sim(world, config);
    sim.run(100);
    EXPECT_EQ(sim.count(0, Action::dense), 100);
    EXPECT_EQ(sim.agreements, 0);
    EXPECT_EQ(sim.total_shadow_s, 0);
    EXPECT_EQ(sim.gates[0].decision(0).why, why);
  }
}

TEST(GateModes, WithoutALinkModelItStaysDenseAndSaysSo) {
  Simulation sim(World{}, {});
  sim.gates[0].set_link({});
  sim.run(100);
  EXPECT_EQ(sim.gates[0].running(0), 0);
  EXPECT_EQ(sim.gates[0].decision(0).why, Why::no_link_model);
}

TEST(GateModes, EmptyAndUnofferedBuckets) {
  World w;
  w.bucket_bytes = {4e6, 0};
  Simulation sim(w, {});
  sim.run(100);
  EXPECT_EQ(sim.gates[0].running(0), 1);
  EXPECT_EQ(sim.gates[0].running(1), 0);
  EXPECT_EQ(sim.gates[0].decision(1).why, Why::empty_bucket);
  // A codec that is not offered for a bucket is neither run nor measured.
  w.bucket_bytes = {4e6};
  w.codecs = {SimCodec{"f16-only", Exchange::two_shot, 1, std::numeric_limits<double>::infinity()}, SimCodec{"int8"}};
  Simulation partly(w, {});
  partly.run(100);
  EXPECT_EQ(partly.gates[0].running(0), 2);
  for (const StepPlan& plan : partly.actions[0]) EXPECT_NE(plan.shadow, 1);
  GateConfig on;
  on.mode = Mode::on;
  Simulation forced(w, on);
  forced.run(10);
  EXPECT_EQ(forced.count(0, Action::dense), 10);
  EXPECT_EQ(forced.gates[0].decision(0).why, Why::no_candidate);
  w.codecs = {SimCodec{}};
  w.bucket_bytes = {};
  Simulation none(w, {});
  none.run(100);
  EXPECT_EQ(none.agreements, 0);
  w.bucket_bytes = {4e6};
  w.codecs = {};
  Simulation no_codec(w, {});
  no_codec.run(100);
  EXPECT_EQ(no_codec.count(0, Action::dense), 100);
  EXPECT_EQ(no_codec.gates[0].decision(0).why, Why::no_candidate);
}

TEST(GateModes, BadConfigurationIsRefused) {
  Gate gate;
  const CandidateInfo nameless;
  CandidateInfo good;
  std::strcpy(good.name, "int8");
  const BucketInfo bucket{4e6, {1e6}};
  const auto create = [&](const GateConfig& c, CandidateInfo candidate, BucketInfo b) {
    return Gate::create(c, {&candidate, 1}, {&b, 1}, &gate).code();
  };
  EXPECT_EQ(create({}, good, bucket), StatusCode::ok);
  EXPECT_EQ(create({}, nameless, bucket), StatusCode::invalid_argument);
  EXPECT_EQ(create({}, good, BucketInfo{-1, {1}}), StatusCode::invalid_argument);
  EXPECT_EQ(create({}, good, BucketInfo{4e6, {kNaN}}), StatusCode::invalid_argument);
  GateConfig c;
  c.ranks = 0;
  EXPECT_EQ(create(c, good, bucket), StatusCode::invalid_argument);
  c = {}, c.window = 0;
  EXPECT_EQ(create(c, good, bucket), StatusCode::invalid_argument);
  c = {}, c.verify_window = 2;
  EXPECT_EQ(create(c, good, bucket), StatusCode::invalid_argument);
  c = {}, c.token_fraction = kNaN;
  EXPECT_EQ(create(c, good, bucket), StatusCode::invalid_argument);
  const std::vector<CandidateInfo> many(kMaxCandidates + 1, good);
  EXPECT_EQ(Gate::create({}, many, {&bucket, 1}, &gate).code(), StatusCode::invalid_argument);
}

TEST(GateModes, BadSamplesAreCountedAndChangeNothing) {
  Simulation sim(World{}, {});
  for (Gate& gate : sim.gates) {
    for (const double bad : {kNaN, 0.0, -0.7115e-3, std::numeric_limits<double>::infinity()}) {
      Sample s;
      s.transfer_s = bad;
      gate.record(0, s);
      s.candidate = 1, s.shadow = true, s.encode_s = bad, s.decode_s = 1e-3;
      gate.record(0, s);
    }
    Sample failed;
    failed.candidate = 1, failed.shadow = true, failed.ok = false;
    failed.encode_s = failed.decode_s = 1e-6;
    gate.record(0, failed);
    Sample unknown;
    unknown.candidate = 9;
    gate.record(0, unknown);
    gate.record(77, unknown);
    EXPECT_EQ(gate.totals().rejected_samples, 10u);
  }
  sim.run(100);
  EXPECT_EQ(sim.gates[0].running(0), 1);
  EXPECT_EQ(sim.gates[0].totals().rejected_samples, 10u);
}

TEST(GateState, ResumesExactly) {
  for (const uint64_t cut : {5u, 25u, 70u, 333u}) {
    World w;
    w.noise = 0.02;
    w.codecs = {SimCodec{"bf16", Exchange::two_shot, 1, 2, 8e9, 16e9},
                SimCodec{"int8", Exchange::two_shot, 2, 3.94, 4e9, 8e9, 80e-3}};
    Simulation whole(w, {}), first(w, {}), resumed(w, {});
    whole.run(600);
    first.run(cut);
    for (uint32_t r = 0; r < w.ranks; ++r) {
      std::vector<std::byte> bytes(first.gates[r].state_bytes());
      ASSERT_TRUE(first.gates[r].save(bytes).ok());
      first.gates[r] = std::move(resumed.gates[r]);  // same noise generator, gates that know nothing yet
      ASSERT_TRUE(first.gates[r].load(bytes).ok());
      first.gates[r].set_log({});
    }
    first.gates[0].set_link(link_model(w.link, w.ranks));
    first.run(600 - cut);
    for (size_t i = 0; i < 600; ++i) {
      ASSERT_EQ(first.actions[0][i].action, whole.actions[0][i].action) << "cut " << cut << " step " << i;
      ASSERT_EQ(first.actions[0][i].candidate, whole.actions[0][i].candidate) << "cut " << cut << " step " << i;
    }
    EXPECT_EQ(first.gates[0].totals().saved_s, whole.gates[0].totals().saved_s);
    EXPECT_STREQ(first.gates[0].explain(0).text, whole.gates[0].explain(0).text);
  }
}

TEST(GateState, RefusesDamageAndOtherConfigurations) {
  Simulation sim(World{}, {});
  sim.run(50);
  std::vector<std::byte> bytes(sim.gates[0].state_bytes());
  EXPECT_EQ(sim.gates[0].save(std::span(bytes).first(bytes.size() - 1)).code(), StatusCode::payload_too_small);
  ASSERT_TRUE(sim.gates[0].save(bytes).ok());
  for (size_t i = 0; i < bytes.size(); i += 7) {
    std::vector<std::byte> damaged = bytes;
    damaged[i] ^= std::byte{0x40};
    EXPECT_FALSE(sim.gates[1].load(damaged).ok()) << "byte " << i;
  }
  EXPECT_EQ(sim.gates[1].load(std::span(bytes).first(bytes.size() - 1)).code(), StatusCode::bad_payload);
  EXPECT_EQ(sim.gates[1].load({}).code(), StatusCode::bad_payload);
  World w;
  w.ranks = 3;
  Simulation other(w, {});
  EXPECT_EQ(other.gates[0].load(bytes).code(), StatusCode::peer_mismatch);
  EXPECT_EQ(other.gates[0].step(), 0u);
}

TEST(GateLog, EveryLineIsStrictJsonOnEveryRankAlike) {
  const char* before = std::setlocale(LC_NUMERIC, nullptr);
  const std::string saved = before != nullptr ? before : "C";
  std::setlocale(LC_NUMERIC, "de_DE.UTF-8");  // a comma would break it; no effect where the locale is not installed
  World w;
  w.noise = 0.02;
  w.codecs = {SimCodec{"bf\"16\\\n", Exchange::two_shot, 1, 2, 8e9, 16e9},
              SimCodec{"int8", Exchange::two_shot, 2, 3.94, 4e9, 8e9, 80e-3}};
  w.bucket_bytes = {4e6, 0, 2e6};
  Simulation sim(w, {});
  sim.run(500);
  std::setlocale(LC_NUMERIC, saved.c_str());
  std::set<std::string> events;
  for (const std::string& line : sim.logs[0]) {
    EXPECT_EQ(line.find("nan"), std::string::npos);
    EXPECT_EQ(line.find('\n'), std::string::npos);
    const auto record = nlohmann::json::parse(line);
    EXPECT_EQ(record.at("v"), 1);
    EXPECT_TRUE(record.contains("step") && record.contains("epoch"));
    events.insert(record.at("event").get<std::string>());
  }
  for (const char* event : {"start", "startup", "predict", "verify", "close", "hold"})
    EXPECT_TRUE(events.count(event)) << event;
  for (uint32_t r = 1; r < w.ranks; ++r) EXPECT_EQ(sim.logs[r], sim.logs[0]);
  EXPECT_EQ(nlohmann::json::parse(sim.logs[0][0]).at("candidates").at(0), "bf\"16\\\n");
}

TEST(GateLog, LinkRecord) {
  std::vector<std::string> lines;
  const LogSink sink{&lines, [](void* context, const char* line, size_t size) {
                       static_cast<std::vector<std::string>*>(context)->emplace_back(line, size);
                     }};
  log_link(sink, "ib-ndr", link_model({5e-6, 50e9}, 4), nullptr);
  ASSERT_EQ(lines.size(), 3u);
  const auto record = nlohmann::json::parse(lines[0]);
  EXPECT_EQ(record.at("collective"), "all_reduce");
  EXPECT_EQ(record.at("fixed_s"), 2 * 3 * 5e-6);
  EXPECT_TRUE(record.at("max_error").is_null());
  lines.clear();
  log_link(sink, "probe", LinkModel{}, nullptr);
  EXPECT_EQ(nlohmann::json::parse(lines[2]).at("usable"), false);
  EXPECT_TRUE(nlohmann::json::parse(lines[2]).at("per_byte_s").is_null());
}

}  // namespace
}  // namespace gradgate::gate
