// Residuals through a session's life: the conservation law under opening, closing, probing, flushing and regrouping;
// checkpoints; layouts.
#include <algorithm>
#include <limits>
#include <random>

#include "tests/session/session_fixture.h"

namespace gradgate::test {
namespace {

/// Parameters of a tiny model, regrouped at will: bucket b holds the parameters listed in groups[b].
struct Model {
  std::vector<size_t> sizes;

  std::vector<std::vector<ParamSlice>> slices(const std::vector<std::vector<size_t>>& groups) const {
    std::vector<std::vector<ParamSlice>> out;
    for (const auto& group : groups) {
      size_t offset = 0;
      auto& bucket = out.emplace_back();
      for (const size_t p : group) {
        bucket.push_back({100 + p, offset, sizes[p]});
        offset += sizes[p];
      }
    }
    return out;
  }
};

Status set_layout(Session& session, const std::vector<std::vector<ParamSlice>>& slices) {
  std::vector<BucketLayout> layout;
  for (const auto& bucket : slices) layout.push_back({DType::f32, bucket});
  return session.set_layout(layout);
}

/// N·Σ out and Σ g per parameter element, and the residual where it lies now.
struct Ledger {
  std::vector<std::vector<double>> sent, given;
  explicit Ledger(const Model& model) {
    for (const size_t n : model.sizes) {
      sent.emplace_back(n);
      given.emplace_back(n);
    }
  }
};

void law_run(const char* spec, Mode mode, int ranks, uint64_t seed, double tolerance, int ranks_per_node = 0) {
  SCOPED_TRACE(std::string(spec) + " ranks " + std::to_string(ranks) + " seed " + std::to_string(seed));
  const Model model{{300, 1, 0, 700, 5000}};
  std::vector<Ledger> ledgers(static_cast<size_t>(ranks), Ledger(model));
  std::vector<std::vector<std::vector<double>>> residuals(static_cast<size_t>(ranks));
  std::vector<uint64_t> compressed(static_cast<size_t>(ranks));
  const LinkSpec slow{1e-6, 1e6};  // so slow that even these tiny buckets are worth compressing
  on_ranks(ranks, &slow, [&](int r, Communicator& comm) {
    Ledger& ledger = ledgers[static_cast<size_t>(r)];
    Candidate candidate;
    ASSERT_TRUE(parse_candidate(spec, &candidate, nullptr).ok());
    const auto session = make_session(comm, mode, {}, [&](SessionOptions& options) {
      options.candidates = {&candidate, 1};
      options.ranks_per_node = ranks_per_node;
    });
    std::mt19937_64 random(seed);  // equal on all ranks: every rank makes the same calls
    std::vector<std::vector<size_t>> groups = {{0, 1, 2, 3, 4}};
    auto slices = model.slices(groups);
    ASSERT_TRUE(set_layout(*session, slices).ok()) << session->last_error();
    for (uint64_t step = 0; step < 400; ++step) {
      if (random() % 97 == 0) {  // the trainer regroups its buckets
        std::vector<size_t> order = {0, 1, 2, 3, 4};
        std::shuffle(order.begin(), order.end(), random);
        groups.clear();
        for (const size_t p : order) {
          if (groups.empty() || random() % 2 == 0) groups.emplace_back();
          groups.back().push_back(p);
        }
        slices = model.slices(groups);
        ASSERT_TRUE(set_layout(*session, slices).ok()) << session->last_error();
      }
      if (random() % 53 == 0) {
        ASSERT_TRUE(session->flush().ok());
      }
      const bool unused = random() % 3 == 0;  // parameter 3 takes no part in some steps
      comm.advance(1e-3);
      for (size_t b = 0; b < slices.size(); ++b) {
        std::vector<float> gradient;
        for (const ParamSlice& s : slices[b]) {
          const size_t p = s.param_id - 100;
          for (size_t i = 0; i < s.count; ++i) {
            const float g = unused && p == 3 ? 0.0f : small_integer(r, step, p * 10000 + i);
            ledger.given[p][i] += static_cast<double>(g);
            gradient.push_back(g);
          }
        }
        ASSERT_TRUE(session->all_reduce(static_cast<uint32_t>(b), {gradient.data(), gradient.size(), DType::f32}).ok())
            << session->last_error();
        for (const ParamSlice& s : slices[b])
          for (size_t i = 0; i < s.count; ++i)
            ledger.sent[s.param_id - 100][i] +=
                static_cast<double>(ranks) * static_cast<double>(gradient[s.offset + i]);
      }
    }
    auto& mine = residuals[static_cast<size_t>(r)];
    mine.resize(model.sizes.size());
    for (size_t b = 0; b < slices.size(); ++b)
      for (const ParamSlice& s : slices[b])
        for (size_t i = 0; i < s.count; ++i)
          mine[s.param_id - 100].push_back(
              session->residual(static_cast<uint32_t>(b)) == nullptr
                  ? 0
                  : static_cast<double>(session->residual(static_cast<uint32_t>(b))[s.offset + i]));
    compressed[static_cast<size_t>(r)] = session->stats().compressed_buckets;
    EXPECT_EQ(session->stats().dropped_residuals, 0u);
  });
  EXPECT_GT(compressed[0], 100u) << "the gate never opened: the test says nothing";
  double worst = 0;
  for (size_t p = 0; p < model.sizes.size(); ++p) {
    for (size_t i = 0; i < model.sizes[p]; ++i) {
      double given = 0, kept = 0;
      for (int r = 0; r < ranks; ++r) {
        given += ledgers[static_cast<size_t>(r)].given[p][i];
        kept += residuals[static_cast<size_t>(r)][p][i];
      }
      worst = std::max(worst, std::fabs(ledgers[0].sent[p][i] + kept - given));
    }
  }
  EXPECT_LE(worst, tolerance);
}

// A trainer drops what arrives for a parameter that no rank used. So nothing may: neither a result, nor a change of the
// residual, also where the parameter shares groups of 256 elements with its neighbours.
void unused_run(const char* spec, int ranks, size_t count, bool scaled) {
  SCOPED_TRACE(std::string(spec) + " ranks " + std::to_string(ranks) + " count " + std::to_string(count));
  const Model model{{count, count, count}};
  on_ranks(ranks, nullptr, [&](int r, Communicator& comm) {
    Candidate candidate;
    ASSERT_TRUE(parse_candidate(spec, &candidate, nullptr).ok());
    const auto session = make_session(comm, Mode::on, {}, [&](SessionOptions& options) {
      options.candidates = {&candidate, 1};
    });
    ASSERT_TRUE(set_layout(*session, model.slices({{0, 1, 2}})).ok()) << session->last_error();
    if (scaled) {
      ASSERT_TRUE(session->set_gradient_scale(1).ok());
    }
    std::vector<float> before(3 * count);
    for (uint64_t step = 0; step < 12; ++step) {
      const bool used = step < 4 || step > 9, overflows = scaled && step == 6;
      std::vector<float> gradient(3 * count);
      for (size_t i = 0; i < gradient.size(); ++i)
        gradient[i] = used || i / count != 1 ? small_integer(r, step, i) : (i % 2 == 0 ? 0.0f : -0.0f);
      if (overflows) gradient[0] = std::numeric_limits<float>::infinity();
      ASSERT_TRUE(session->all_reduce(0, {gradient.data(), gradient.size(), DType::f32}).ok()) << session->last_error();
      std::vector<float> after(3 * count);
      ASSERT_TRUE(session->read_residual(0, after.data()).ok());
      if (!used) {
        for (size_t i = count; i < 2 * count; ++i) {
          ASSERT_EQ(after[i], before[i]) << "step " << step << " element " << i;
          if (!overflows) {
            ASSERT_EQ(gradient[i], 0.0f) << "step " << step << " element " << i;
          }
        }
      }
      if (overflows) {
        EXPECT_EQ(after, before);  // the step is taken back as a whole
      }
      before = after;
    }
    EXPECT_TRUE(std::any_of(before.begin() + static_cast<ptrdiff_t>(count),
                            before.begin() + static_cast<ptrdiff_t>(2 * count), [](float e) { return e != 0.0f; }));
  });
}

TEST(UnusedParameter, NeitherSendsNorLosesAnything) {
  for (const char* spec : {"chunk-topk:4/1024", "chunk-topk:4/1024@all_gather", "topk:0.02", "int8:ef", "int4"}) {
    for (const int ranks : {2, 3})
      for (const size_t count : {100, 1000, 1024}) unused_run(spec, ranks, count, false);
    unused_run(spec, 2, 1000, true);
  }
}

TEST(ConservationLaw, HoldsExactlyForTopkOnIntegersThroughGateFlushAndRegrouping) {
  for (const uint64_t seed : {1, 2, 3}) {
    law_run("chunk-topk:8/1024", Mode::automatic, 2, seed, 0);
    law_run("chunk-topk:8/1024", Mode::automatic, 4, seed, 0);
    law_run("chunk-topk:3/32", Mode::on, 4, seed, 0);
    law_run("chunk-topk:8/1024@all_gather", Mode::automatic, 2, seed, 0);
    law_run("chunk-topk:3/32@all_gather", Mode::on, 4, seed, 0);
    law_run("topk:0.02", Mode::automatic, 2, seed, 0);
    law_run("topk:0.1", Mode::on, 4, seed, 0);
    law_run("randk:0.02", Mode::automatic, 2, seed, 0);
    law_run("randk:0.1", Mode::on, 4, seed, 0);
    law_run("chunk-topk:8/1024@hierarchical", Mode::on, 4, seed, 0, 2);
    law_run("topk:0.02@hierarchical", Mode::automatic, 4, seed, 0, 2);
    law_run("chunk-topk:3/32@hierarchical", Mode::automatic, 4, seed, 0, 1);
  }
}

TEST(ConservationLaw, HoldsWithinRoundingForOtherCodecsAndRanks) {
  // T·(N+3)·2⁻²⁴·max|sum|: sums of at most 4 ranks of |g| ≤ 8, plus residuals of that size.
  law_run("int8:ef", Mode::automatic, 4, 7, 400 * 7 * std::ldexp(1.0, -24) * 200);
  law_run("chunk-topk:8/1024", Mode::automatic, 3, 7, 400 * 6 * std::ldexp(1.0, -24) * 2000);
  law_run("int4", Mode::automatic, 4, 7, 400 * 7 * std::ldexp(1.0, -24) * 200);
  law_run("int4:hadamard:sr", Mode::on, 3, 8, 400 * 6 * std::ldexp(1.0, -24) * 2000);
  law_run("onebit", Mode::automatic, 3, 7, 400 * 6 * std::ldexp(1.0, -24) * 2000);
}

/// cases EF-1: the reference sequence, on two identical ranks; averages equal what one rank would send.
TEST(Feedback, ReferenceSequenceThroughThePublicApi) {
  const float expected[6][4] = {{4, 0, 0, 0}, {0, 6, 0, 0}, {8, 0, 0, 0}, {0, 0, 8, 0}, {0, 9, 0, 0}, {12, 0, 0, 0}};
  // Four elements are one shard, owned by rank 0: it adds its own gradient exactly, so only rank 1's part is thinned
  // out at first. With rank 0 silent the sequence is rank 1's alone: averages are half of it.
  on_ranks(2, nullptr, [&](int r, Communicator& comm) {
    const auto session = make_session(comm, Mode::on, {codec("chunk-topk:1/32")});
    ASSERT_TRUE(set_simple_layout(*session, {4}).ok());
    std::vector<float> sent(4, 0.0f);
    for (int step = 0; step < 6; ++step) {
      float g[4] = {0, 0, 0, 0};
      if (r == 1) {
        const float mine[4] = {4, 3, 2, 1};
        std::copy_n(mine, 4, g);
      }
      ASSERT_TRUE(session->all_reduce(0, {g, 4, DType::f32}).ok()) << session->last_error();
      for (int i = 0; i < 4; ++i) EXPECT_EQ(2 * g[i], expected[step][i]) << "step " << step << " element " << i;
      for (int i = 0; i < 4; ++i) sent[static_cast<size_t>(i)] += 2 * g[i];
    }
    if (r == 1) {
      const float* e = session->residual(0);
      ASSERT_NE(e, nullptr);
      for (int i = 0; i < 4; ++i) EXPECT_EQ(sent[static_cast<size_t>(i)] + e[i], 6.0f * static_cast<float>(4 - i));
    }
  });
}

/// EF-4, policy A: closing (here: a flush) sends what is pending.
TEST(Feedback, FlushSendsWhatIsPending) {
  on_ranks(2, nullptr, [&](int r, Communicator& comm) {
    const auto session = make_session(comm, Mode::on, {codec("chunk-topk:1/32")});
    ASSERT_TRUE(set_simple_layout(*session, {4}).ok());
    const float expected[3][4] = {{4, 0, 0, 0}, {4, 6, 4, 2}, {4, 0, 0, 0}};
    for (int step = 0; step < 3; ++step) {
      if (step == 1) {
        ASSERT_TRUE(session->flush().ok());
      }
      float g[4] = {0, 0, 0, 0};
      if (r == 1) {
        const float mine[4] = {4, 3, 2, 1};
        std::copy_n(mine, 4, g);
      }
      ASSERT_TRUE(session->all_reduce(0, {g, 4, DType::f32}).ok()) << session->last_error();
      for (int i = 0; i < 4; ++i) EXPECT_EQ(2 * g[i], expected[step][i]) << "step " << step << " element " << i;
    }
  });
}

/// EF-3: the same bucket number with another length, and parameters that vanish.
TEST(Feedback, LayoutChangesCarryResidualsByParameterOrCountThem) {
  on_ranks(2, nullptr, [&](int r, Communicator& comm) {
    const auto session = make_session(comm, Mode::on, {codec("chunk-topk:1/32")});
    ASSERT_TRUE(set_simple_layout(*session, {4, 6}, DType::f32, 1).ok());
    const auto step = [&](const std::vector<size_t>& counts) {
      for (size_t b = 0; b < counts.size(); ++b) {
        std::vector<float> g(counts[b], r == 1 ? 1.0f : 0.0f);
        ASSERT_TRUE(session->all_reduce(static_cast<uint32_t>(b), {g.data(), g.size(), DType::f32}).ok())
            << session->last_error();
      }
    };
    step({4, 6});
    // Parameters 1 and 2 swap buckets: what was kept follows them.
    const ParamSlice first{2, 0, 6}, second{1, 0, 4};
    const BucketLayout swapped[] = {{DType::f32, {&first, 1}}, {DType::f32, {&second, 1}}};
    ASSERT_TRUE(session->set_layout(swapped).ok()) << session->last_error();
    EXPECT_EQ(session->stats().dropped_residuals, 0u);
    if (r == 1) {
      EXPECT_EQ(session->residual(0)[0], 0.0f);  // sent in the first step
      EXPECT_EQ(session->residual(0)[5], 1.0f);
      EXPECT_EQ(session->residual(1)[3], 1.0f);
    }
    // Parameter 2 changes its size, parameter 1 vanishes.
    ASSERT_TRUE(set_simple_layout(*session, {8}, DType::f32, 2).ok()) << session->last_error();
    if (r == 1) {
      EXPECT_EQ(session->stats().dropped_residuals, 8u);  // 5 of parameter 2 and 3 of parameter 1
      EXPECT_EQ(session->stats().dropped_sum, 8.0);
      for (int i = 0; i < 8; ++i) EXPECT_EQ(session->residual(0)[i], 0.0f);
    }
    step({8});
  });
}

struct Saved {
  std::vector<std::byte> state;
  std::vector<std::vector<float>> outputs;
  std::vector<float> residual;  ///< of bucket 0
};

/// `from`…`to` steps of 2 ranks; loads a state first if there is one, saves at the end.
std::vector<Saved> segment(const char* spec, int from, int to, const std::vector<Saved>* previous,
                           const std::vector<size_t>& counts = {3000}) {
  std::vector<Saved> results(2);
  on_ranks(2, &kGigabit, [&](int r, Communicator& comm) {
    Saved& saved = results[static_cast<size_t>(r)];
    const auto session = make_session(comm, Mode::on, {codec(spec)});
    ASSERT_TRUE(set_simple_layout(*session, counts).ok());
    if (previous != nullptr) {
      ASSERT_TRUE(session->load_state((*previous)[static_cast<size_t>(r)].state).ok()) << session->last_error();
    }
    for (int step = from; step < to; ++step) {
      for (size_t b = 0; b < counts.size(); ++b) {
        std::vector<float> g(counts[b]);
        for (size_t i = 0; i < g.size(); ++i) g[i] = 0.37f * small_integer(r, static_cast<uint64_t>(step), i);
        ASSERT_TRUE(session->all_reduce(static_cast<uint32_t>(b), {g.data(), g.size(), DType::f32}).ok())
            << session->last_error();
        saved.outputs.push_back(g);
      }
    }
    saved.residual.assign(session->residual(0), session->residual(0) + counts[0]);
    saved.state.resize(session->state_bytes());
    size_t written = 0;
    ASSERT_TRUE(session->save_state(saved.state, &written).ok());
    EXPECT_EQ(written, saved.state.size());
  });
  return results;
}

TEST(Checkpoint, TwoPlusFourStepsEqualSixBitForBit) {
  for (const char* spec : {"chunk-topk:8/1024", "int8:ef", "int8:sr:ef", "chunk-topk:4/32:bf16", "randk:0.1"}) {
    const auto whole = segment(spec, 0, 6, nullptr);
    const auto first = segment(spec, 0, 2, nullptr);
    const auto rest = segment(spec, 2, 6, &first);
    for (size_t r = 0; r < 2; ++r) {
      for (size_t step = 0; step < 6; ++step)
        EXPECT_EQ(whole[r].outputs[step], step < 2 ? first[r].outputs[step] : rest[r].outputs[step - 2])
            << spec << " step " << step;
      EXPECT_EQ(whole[r].residual, rest[r].residual) << spec;
    }
  }
}

TEST(Checkpoint, RefusesForeignDamagedAndMisplacedStatesWithoutChangingAnything) {
  const auto saved = segment("chunk-topk:8/1024", 0, 3, nullptr);
  const auto attempt = [&](int ranks, const std::vector<size_t>& counts, uint64_t seed,
                           const std::function<std::vector<std::byte>(int)>& state, StatusCode code, const char* text) {
    on_ranks(ranks, &kGigabit, [&](int r, Communicator& comm) {
      const auto session =
          make_session(comm, Mode::on, {codec("chunk-topk:8/1024")}, [&](SessionOptions& o) { o.seed = seed; });
      ASSERT_TRUE(set_simple_layout(*session, counts).ok());
      const Status s = session->load_state(state(r));
      EXPECT_EQ(s.code(), code) << session->last_error();
      EXPECT_NE(std::string(session->last_error()).find(text), std::string::npos) << session->last_error();
      for (size_t i = 0; i < counts[0]; ++i) ASSERT_EQ(session->residual(0)[i], 0.0f);
      std::vector<float> g(counts[0], 1.0f);  // still works
      EXPECT_TRUE(session->all_reduce(0, {g.data(), g.size(), DType::f32}).ok()) << session->last_error();
    });
  };
  const auto own = [&](int r) { return saved[static_cast<size_t>(r % 2)].state; };
  attempt(3, {3000}, 0, own, StatusCode::peer_mismatch, "ranks");
  attempt(2, {3001}, 0, own, StatusCode::peer_mismatch, "3001");
  attempt(2, {3000}, 5, own, StatusCode::peer_mismatch, "seed");
  attempt(
      2, {3000}, 0, [&](int) { return saved[0].state; }, StatusCode::peer_mismatch, "rank");
  attempt(
      2, {3000}, 0,
      [&](int r) {
        auto s = own(r);
        s[s.size() / 2] ^= std::byte{1};
        return s;
      },
      StatusCode::bad_payload, "checksum");
  attempt(
      2, {3000}, 0,
      [&](int r) {
        auto s = own(r);
        s.resize(s.size() - 8);
        return s;
      },
      StatusCode::bad_payload, "checksum");
  attempt(
      2, {3000}, 0, [&](int) { return std::vector<std::byte>(); }, StatusCode::bad_payload, "not a gradgate state");
}

TEST(Checkpoint, OneRankWithABadStateKeepsAllFromLoading) {
  const auto saved = segment("chunk-topk:8/1024", 0, 3, nullptr);
  on_ranks(2, &kGigabit, [&](int r, Communicator& comm) {
    const auto session = make_session(comm, Mode::on, {codec("chunk-topk:8/1024")});
    ASSERT_TRUE(set_simple_layout(*session, {3000}).ok());
    auto state = saved[static_cast<size_t>(r)].state;
    if (r == 1) state[state.size() - 9] ^= std::byte{4};
    EXPECT_FALSE(session->load_state(state).ok());
    for (size_t i = 0; i < 3000; ++i) ASSERT_EQ(session->residual(0)[i], 0.0f);
  });
}

}  // namespace
}  // namespace gradgate::test
