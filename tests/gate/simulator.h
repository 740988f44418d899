// A small world for gates: N ranks' gates, fed with the times of a modelled link and modelled codecs. No clock
// anywhere; noise comes from a fixed generator, so that every run of a test is the same.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "gate/gate.h"

namespace gradgate::gate {

struct SimCodec {
  const char* name = "int8";
  Exchange exchange = Exchange::two_shot;
  int fidelity = 2;
  double ratio = 3.94;
  double encode_Bps = 4e9, decode_Bps = 8e9;  ///< gradient bytes per second, one encode or decode of a whole bucket
  double hidden_s = 0;                        ///< extra time of a compressed step that no sample shows
  bool fails = false;
  double fixed_s = 0;      ///< per encode or decode call
  double wire_factor = 1;  ///< real transfers of this codec take so many times the model
};

struct World {
  uint32_t ranks = 4;
  double compute_s = 20e-3;
  Link link{50e-6, 125e6};
  std::vector<double> bucket_bytes{4e6};
  std::vector<SimCodec> codecs{SimCodec{}};
  double noise = 0;   ///< relative, uniform either way, on every time
  double late_s = 0;  ///< one rank in turn arrives so much late: the others wait in the collective
  double codec_slowdown_of_rank0 = 1;
  bool hidden_on_rank0_only = false;  ///< SimCodec::hidden_s shows in the step time of rank 0 only
  double load = 1;                    ///< real transfers take so many times the model
  uint64_t cold_steps = 0;            ///< the first steps of the job transfer ten times slower
  uint32_t ranks_per_node = 0;        ///< with a value: two levels, `link` between the nodes and …
  Link inside{};                      ///< … this one inside

  LinkModel model() const {
    return ranks_per_node > 0 ? two_level_model(inside, link, ranks, ranks_per_node) : link_model(link, ranks);
  }
};

class Simulation {
 public:
  Simulation(World w, GateConfig config) : world(std::move(w)), config_(config) {
    config_.ranks = world.ranks;
    std::vector<CandidateInfo> candidates;
    for (const SimCodec& c : world.codecs) {
      CandidateInfo info;
      std::strncpy(info.name, c.name, sizeof(info.name) - 1);
      info.exchange = c.exchange, info.fidelity = c.fidelity;
      candidates.push_back(info);
    }
    std::vector<BucketInfo> buckets;
    for (const double bytes : world.bucket_bytes) {
      BucketInfo info{bytes, {}};
      for (size_t i = 0; i < world.codecs.size(); ++i) info.payload_bytes[i] = std::ceil(bytes / world.codecs[i].ratio);
      buckets.push_back(info);
    }
    logs.resize(world.ranks);
    gates.resize(world.ranks);
    for (uint32_t r = 0; r < world.ranks; ++r) {
      EXPECT_TRUE(Gate::create(config_, candidates, buckets, &gates[r]).ok());
      gates[r].set_log({&logs[r], [](void* context, const char* line, size_t size) {
                          static_cast<std::vector<std::string>*>(context)->emplace_back(line, size);
                        }});
    }
    if (config_.ranks > 0) gates[0].set_link(world.model());
    actions.assign(world.bucket_bytes.size(), {});
  }

  /// Runs steps on all ranks, agreements included; checks that all ranks plan alike.
  void run(uint64_t steps) {
    for (uint64_t i = 0; i < steps; ++i) step();
  }

  void step() {
    const LinkModel link = world.model();
    const uint64_t now = gates[0].step();
    double step_s = world.compute_s * jitter() + world.late_s;
    double shadow_s = 0, hidden_s = 0;
    for (size_t b = 0; b < world.bucket_bytes.size(); ++b) {
      const StepPlan plan = gates[0].plan(b);
      actions[b].push_back(plan);
      double slowest_codec = 0, slowest_shadow = 0;
      const double bytes = world.bucket_bytes[b];
      const double wire =
          plan.action == Action::compress
              ? codec(plan.candidate).wire_factor * exchange_cost(codec(plan.candidate).exchange, link,
                                                                  std::ceil(bytes / codec(plan.candidate).ratio), bytes)
              : exchange_cost(Exchange::all_reduce, link, bytes);
      const double transfer = wire * world.load * (now < world.cold_steps ? 10 : 1) * jitter();
      for (uint32_t r = 0; r < world.ranks; ++r) {
        const StepPlan own = gates[r].plan(b);
        ASSERT_EQ(static_cast<int>(own.action), static_cast<int>(plan.action)) << "step " << now << " rank " << r;
        ASSERT_EQ(own.candidate, plan.candidate) << "step " << now << " rank " << r;
        ASSERT_EQ(own.shadow, plan.shadow) << "step " << now << " rank " << r;
        ASSERT_TRUE(own.shadow == -1 || own.shadow != own.candidate) << "what runs is measured as it runs";
        Sample sample;
        sample.candidate = plan.candidate;
        // Every rank but the late one waits; the gate must not take waiting for transfer.
        sample.transfer_s = transfer + (r == now % world.ranks ? 0 : world.late_s);
        if (plan.action == Action::compress) {
          sample.encode_s = call_s(plan.candidate, bytes / codec(plan.candidate).encode_Bps, r);
          sample.decode_s =
              decodes(plan.candidate) * call_s(plan.candidate, bytes / codec(plan.candidate).decode_Bps, r);
          sample.ok = !codec(plan.candidate).fails;
          slowest_codec = std::max(slowest_codec, sample.encode_s + sample.decode_s);
          hidden_s = std::max(hidden_s, codec(plan.candidate).hidden_s);
        }
        gates[r].record(b, sample);
        if (plan.shadow > 0) {
          Sample shadow;
          shadow.candidate = static_cast<uint8_t>(plan.shadow);
          shadow.shadow = true;
          shadow.encode_s = call_s(plan.shadow, bytes / codec(plan.shadow).encode_Bps, r);
          shadow.decode_s = decodes(plan.shadow) * call_s(plan.shadow, bytes / codec(plan.shadow).decode_Bps, r);
          gates[r].record(b, shadow);
          slowest_shadow = std::max(slowest_shadow, shadow.encode_s + shadow.decode_s);
        }
      }
      step_s += transfer + slowest_codec;
      shadow_s += slowest_shadow;
    }
    total_shadow_s += shadow_s;
    total_s += step_s + shadow_s + hidden_s;
    step_times.push_back(std::isnan(given_step_s) ? step_s + shadow_s + hidden_s : given_step_s);
    for (uint32_t r = 0; r < world.ranks; ++r) {
      gates[r].end_step(step_times.back() - (world.hidden_on_rank0_only && r > 0 ? hidden_s : 0));
    }
    agree();
  }

  void agree() {
    for (uint32_t r = 1; r < world.ranks; ++r) ASSERT_EQ(gates[r].agreement_due(), gates[0].agreement_due());
    if (!gates[0].agreement_due()) return;
    ++agreements;
    const size_t n = gates[0].report_size();
    std::vector<double> reports(world.ranks * n), message(gates[0].message_size());
    for (uint32_t r = 0; r < world.ranks; ++r) {
      ASSERT_EQ(gates[r].report_size(), n);
      ASSERT_TRUE(gates[r].write_report(std::span(reports).subspan(r * n, n)).ok());
    }
    ASSERT_TRUE(gates[0].decide(reports, message).ok());
    for (Gate& gate : gates) ASSERT_TRUE(gate.apply(message).ok());
  }

  /// Lines of rank 0 that contain both texts.
  std::vector<std::string> lines(const std::string& event, const std::string& text = "") const {
    std::vector<std::string> found;
    for (const std::string& line : logs[0]) {
      if (line.find("\"event\":\"" + event + "\"") != std::string::npos && line.find(text) != std::string::npos)
        found.push_back(line);
    }
    return found;
  }
  int count(size_t bucket, Action action, size_t from = 0) const {
    int n = 0;
    for (size_t i = from; i < actions[bucket].size(); ++i) n += actions[bucket][i].action == action;
    return n;
  }
  SimCodec& codec(int candidate) { return world.codecs[candidate - 1]; }

  World world;
  std::vector<Gate> gates;
  std::vector<std::vector<std::string>> logs;
  std::vector<std::vector<StepPlan>> actions;  ///< per bucket
  std::vector<double> step_times;
  double total_s = 0, total_shadow_s = 0;
  double given_step_s = std::numeric_limits<double>::quiet_NaN();  ///< not NaN: what the next steps take
  int agreements = 0;

 private:
  // Decoding of one exchange, in passes over the whole vector: two_shot decodes N − 1 shards for the sum and N at the
  // end.
  double decodes(int candidate) {
    const double n = world.ranks;
    return codec(candidate).exchange == Exchange::two_shot ? (2 * n - 1) / n : 1;
  }
  double call_s(int candidate, double work_s, uint32_t rank) {
    return (codec(candidate).fixed_s + work_s) * (rank == 0 ? world.codec_slowdown_of_rank0 : 1) * jitter();
  }
  double jitter() {
    random_ = random_ * 6364136223846793005ull + 1442695040888963407ull;
    return 1 + world.noise * (static_cast<double>(random_ >> 11) / 4503599627370496.0 - 1);
  }
  GateConfig config_;
  uint64_t random_ = 20240117;
};

}  // namespace gradgate::gate
