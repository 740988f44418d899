// One rank fails, lags, disagrees or receives damage: both collectives still run, every rank returns an error, and no
// gradient changes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/multirank/exchange_fixture.h"

namespace gradgate {
namespace {

using namespace test;
using testing::AllOf;
using testing::HasSubstr;

/// What a rank's machine is asked to do beside its work.
struct Fault {
  int rank = 0;
  int fail_after = -1;                           ///< calls fail() after this many collectives
  std::function<void(ExchangeArgs&)> args = {};  ///< changes the rank's arguments
  std::function<void(int collective, const CollectiveCall&)> received = {};  ///< changes what the rank received
};
struct Report {
  Status status;
  std::string text;
  int collectives = 0;
  bool gradient_changed = false;
};

/// Drives a machine on every rank by hand, with one faulty rank.
std::vector<Report> drive(int size, const char* text, const Fault& fault, size_t n = 3000) {
  Ranks ranks(size, n, DType::f32);
  for (size_t r = 0; r < ranks.gradients.size(); ++r)
    ranks.gradients[r] = Gradient::of(Gen::gaussian, n, r, DType::f32);
  const Ranks before = ranks;
  std::vector<Report> reports(ranks.gradients.size());
  run_ranks(size, [&](Communicator& comm) {
    const bool faulty = comm.rank() == fault.rank;
    Report& report = reports[static_cast<size_t>(comm.rank())];
    ExchangeArgs args = ranks.args(comm.rank(), candidate_of(text), Feedback::none, 11);
    if (faulty && fault.args) fault.args(args);
    std::vector<std::byte> workspace(exchange_workspace_bytes(args.shape));
    args.workspace = workspace;
    ExchangeMachine machine;
    ASSERT_TRUE(machine.begin(args).ok()) << machine.last_error();
    for (;;) {
      if (faulty && report.collectives == fault.fail_after) machine.fail(StatusCode::out_of_memory);
      CollectiveCall call;
      report.status = machine.next(&call);
      if (!report.status.ok() || call.kind == Collective::none) break;
      ++report.collectives;
      const Status status = call.kind == Collective::all_to_all
                                ? comm.all_to_all(call.send, call.recv, call.count, call.dtype, {}, patient())
                            : call.kind == Collective::all_reduce
                                ? comm.all_reduce_sum(call.send, call.recv, call.count, call.dtype, {}, patient())
                                : comm.all_gather(call.send, call.recv, call.count, call.dtype, {}, patient());
      GRADGATE_EXPECT_OK(status, comm);
      if (faulty && fault.received) fault.received(report.collectives, call);
    }
    report.text = machine.last_error();
    CollectiveCall again;
    EXPECT_EQ(machine.next(&again), report.status) << "a finished machine stays finished";
    EXPECT_EQ(again.kind, Collective::none);
  });
  for (size_t r = 0; r < reports.size(); ++r)
    reports[r].gradient_changed = !(ranks.gradients[r] == before.gradients[r]);
  return reports;
}

void expect_untouched_after_both_collectives(const std::vector<Report>& reports) {
  for (size_t r = 0; r < reports.size(); ++r) {
    EXPECT_EQ(reports[r].collectives, 2) << "rank " << r;
    EXPECT_FALSE(reports[r].gradient_changed) << "rank " << r;
  }
}

class EveryCodec : public testing::TestWithParam<const char*> {};
std::string codec_name(const testing::TestParamInfo<const char*>& info) { return test_name(info.param); }
INSTANTIATE_TEST_SUITE_P(Failure, EveryCodec, testing::Values("bf16", "int8", "chunk-topk:8/1024"), codec_name);

// COL-8: one rank cannot go on, before the first or between the two collectives.
TEST_P(EveryCodec, AFailingRankIsReportedByAll) {
  for (const int size : {2, 3, 5}) {
    for (const int fail_after : {0, 1}) {
      const std::vector<Report> reports = drive(size, GetParam(), {.rank = size - 1, .fail_after = fail_after});
      expect_untouched_after_both_collectives(reports);
      for (int r = 0; r + 1 < size; ++r) {
        const Report& report = reports[static_cast<size_t>(r)];
        EXPECT_EQ(report.status.code(), StatusCode::peer_failed) << "rank " << r;
        EXPECT_THAT(report.text, AllOf(HasSubstr("over two_shot, stage " + std::to_string(fail_after + 1)),
                                       HasSubstr("rank " + std::to_string(size - 1) + " failed: out of memory")));
      }
      EXPECT_EQ(reports.back().status.code(), StatusCode::out_of_memory) << "the rank itself knows better";
      EXPECT_THAT(reports.back().text, HasSubstr("out of memory"));
    }
  }
}

TEST_P(EveryCodec, ARankThatIsAStepBehindIsAMismatchOnAll) {
  for (const int size : {2, 3, 4}) {
    const std::vector<Report> reports =
        drive(size, GetParam(), {.rank = 1, .args = [](ExchangeArgs& args) { args.seed.step = 10; }});
    expect_untouched_after_both_collectives(reports);
    for (int r = 0; r < size; ++r) {
      const Report& report = reports[static_cast<size_t>(r)];
      EXPECT_EQ(report.status.code(), StatusCode::peer_mismatch) << "rank " << r;
      EXPECT_THAT(report.text,
                  AllOf(HasSubstr("step: rank "), HasSubstr("step 10"), HasSubstr("step 11"), HasSubstr("rank 1")));
    }
  }
}

// A byte that changes on the way to one rank, anywhere in the header or (chunk-topk) in the indices: all ranks return
// an error.
TEST_P(EveryCodec, DamageOnTheWayFailsAllRanks) {
  for (const int stage : {1, 2}) {
    for (size_t at = 0; at < 32; ++at) {
      if (at >= 24 && at < 28) continue;  // the step is not part of the check: a mismatch, not damage
      Fault fault;
      fault.rank = 1;
      fault.received = [&](int collective, const CollectiveCall& call) {
        if (collective == stage) static_cast<std::byte*>(call.recv)[at] ^= std::byte{0x04};  // in the slot of rank 0
      };
      const std::vector<Report> reports = drive(3, GetParam(), fault);
      EXPECT_EQ(reports[1].status.code(), StatusCode::bad_payload) << "byte " << at;
      EXPECT_THAT(reports[1].text,
                  AllOf(HasSubstr("stage " + std::to_string(stage)), HasSubstr("damaged payload from rank 0")));
      EXPECT_FALSE(reports[1].gradient_changed);
      if (stage == 2) continue;  // after the last collective there is no way to tell the others
      expect_untouched_after_both_collectives(reports);
      for (const size_t r : {0, 2}) {
        EXPECT_EQ(reports[r].status.code(), StatusCode::peer_failed) << "byte " << at;
        EXPECT_THAT(reports[r].text, HasSubstr("rank 1 failed: bad payload"));
      }
    }
  }
}

/// Exchanges of one collective: the last rank runs out of memory before it, and all ranks return an error. `told`: what
/// the others' text must match, by the number of ranks; the rank itself says what it ran into.
template <class Told>
void expect_last_rank_reported_by_all(const char* text, Told told) {
  for (const int size : {2, 3, 5}) {
    const std::vector<Report> reports = drive(size, text, {.rank = size - 1, .fail_after = 0});
    for (int r = 0; r < size; ++r) {
      const Report& report = reports[static_cast<size_t>(r)];
      EXPECT_EQ(report.collectives, 1) << "rank " << r;
      EXPECT_FALSE(report.gradient_changed) << "rank " << r;
      if (r + 1 == size) {
        EXPECT_EQ(report.status.code(), StatusCode::out_of_memory) << "the rank itself knows better";
        EXPECT_THAT(report.text, HasSubstr("out of memory"));
        continue;
      }
      EXPECT_EQ(report.status.code(), StatusCode::peer_failed) << "rank " << r;
      EXPECT_THAT(report.text, told(size)) << "rank " << r;
    }
  }
}

// ---- all_reduce with a codec: one sum, whose witness says what headers say elsewhere ----

class Summed : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Failure, Summed, testing::Values("randk:0.01", "randk:0.1:bf16", "bf16@all_reduce"),
                         codec_name);

TEST_P(Summed, AFailingRankIsReportedByAll) {
  expect_last_rank_reported_by_all(GetParam(),
                                   [](int) { return HasSubstr("over all_reduce: a rank failed: out of memory"); });
}

// A step, a seed, a bucket, a gradient's dtype: whatever one rank of many has otherwise, all notice.
TEST_P(Summed, ARankThatDiffersIsAMismatchOnAll) {
  const bool drawn = candidate_of(GetParam()).codec.id == CodecId::randk;
  const std::function<void(ExchangeArgs&)> changes[] = {
      [](ExchangeArgs& args) { args.seed.step = 10; },
      [](ExchangeArgs& args) { args.seed.key ^= uint64_t{1} << 50; },
      [](ExchangeArgs& args) { args.seed.tensor = 4; },
  };
  for (const auto& change : changes) {
    for (const int size : {2, 3, 8}) {
      const std::vector<Report> reports = drive(size, GetParam(), {.rank = 1, .args = change});
      for (int r = 0; r < size; ++r) {
        const Report& report = reports[static_cast<size_t>(r)];
        EXPECT_EQ(report.collectives, 1) << "rank " << r;
        if (&change != &changes[0] && !drawn) {  // bf16 depends on no seed
          EXPECT_TRUE(report.status.ok());
          continue;
        }
        EXPECT_EQ(report.status.code(), StatusCode::peer_mismatch) << "rank " << r << " of " << size;
        EXPECT_FALSE(report.gradient_changed) << "rank " << r;
        EXPECT_THAT(report.text, AllOf(HasSubstr("ranks differ in spec, count, step or seed"),
                                       HasSubstr(r == 1 && &change == &changes[0] ? "at step 10" : "at step 11")));
      }
    }
  }
}

// Ratios that mean the same number of entries: the backend sees equal calls, the witness does not.
TEST(Summed, RatiosWithAsManyEntriesAreAMismatch) {
  const std::vector<Report> reports =
      drive(2, "randk:0.01",
            {.rank = 1, .args = [](ExchangeArgs& args) { args.shape.candidate = candidate_of("randk:0.0100001"); }});
  for (const Report& report : reports) {
    EXPECT_EQ(report.status.code(), StatusCode::peer_mismatch);
    EXPECT_FALSE(report.gradient_changed);
  }
}

// ---- all_gather: one collective, which carries everybody's error ----

class Gathered : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Failure, Gathered,
                         testing::Values("bf16@all_gather", "int8@all_gather", "chunk-topk:8/1024@all_gather",
                                         "topk:0.01", "randk:0.01@all_gather"),
                         codec_name);

TEST_P(Gathered, AFailingRankIsReportedByAll) {
  expect_last_rank_reported_by_all(GetParam(), [](int size) {
    return AllOf(HasSubstr("over all_gather: rank " + std::to_string(size - 1) + " failed"),
                 HasSubstr("out of memory"));
  });
}

TEST_P(Gathered, ARankThatIsAStepBehindIsAMismatchOnAll) {
  const std::vector<Report> reports =
      drive(3, GetParam(), {.rank = 1, .args = [](ExchangeArgs& args) { args.seed.step = 10; }});
  for (const Report& report : reports) {
    EXPECT_EQ(report.status.code(), StatusCode::peer_mismatch);
    EXPECT_THAT(report.text, AllOf(HasSubstr("step: rank "), HasSubstr("step 10"), HasSubstr("step 11")));
    EXPECT_FALSE(report.gradient_changed);
  }
}

TEST_P(Gathered, DamageIsFoundByItsReceiver) {
  for (size_t at = 0; at < 32; ++at) {
    if (at >= 24 && at < 28) continue;
    Fault fault;
    fault.rank = 1;
    fault.received = [&](int, const CollectiveCall& call) {
      static_cast<std::byte*>(call.recv)[2 * call.count + at] ^= std::byte{0x04};  // in the slot of rank 2
    };
    const std::vector<Report> reports = drive(3, GetParam(), fault);
    EXPECT_EQ(reports[1].status.code(), StatusCode::bad_payload) << "byte " << at;
    EXPECT_THAT(reports[1].text, HasSubstr("over all_gather: damaged payload from rank 2"));
    EXPECT_FALSE(reports[1].gradient_changed);
  }
}

TEST(Failure, AForgedIndexIsFound) {
  Fault fault;
  fault.rank = 0;
  fault.received = [](int collective, const CollectiveCall& call) {
    if (collective != 1) return;
    // Rank 1's payload for the shard of rank 0: one chunk of 1024, 8 values, then 8 indices. The second becomes equal
    // to the first.
    auto* indices = static_cast<std::byte*>(call.recv) + call.count + 32 + 32;
    std::memcpy(indices + 2, indices, 2);
  };
  const std::vector<Report> reports = drive(2, "chunk-topk:8/1024", fault, 2048);
  EXPECT_EQ(reports[0].status.code(), StatusCode::bad_payload);
  EXPECT_THAT(reports[0].text, HasSubstr("damaged payload from rank 1: index"));
  EXPECT_EQ(reports[1].status.code(), StatusCode::peer_failed);
  expect_untouched_after_both_collectives(reports);
}

// COL-9: another spec whose payloads happen to have the same size is found by the header, and the field is named with
// both values.
TEST(Failure, AnotherSpecIsAMismatchOnAll) {
  Fault fault;
  fault.rank = 2;
  fault.args = [](ExchangeArgs& args) { args.shape.candidate.codec = spec_of("chunk-topk:16/512"); };
  std::vector<Report> reports = drive(3, "chunk-topk:32/1024", fault, 3072);
  expect_untouched_after_both_collectives(reports);
  for (const Report& report : reports) {
    EXPECT_EQ(report.status.code(), StatusCode::peer_mismatch) << report.text;
    EXPECT_THAT(report.text, AllOf(HasSubstr("parameter 0: rank "), HasSubstr("16"), HasSubstr("32")));
  }
  // A version of the library that writes another header version.
  Fault newer;
  newer.rank = 0;
  newer.received = [](int collective, const CollectiveCall& call) {
    if (collective != 1) return;
    auto* header = static_cast<std::byte*>(call.recv) + call.count;  // from rank 1
    header[4] = std::byte{2};
    uint32_t check = 0x811c9dc5u;
    for (size_t i = 4; i < 24; ++i) {
      if (i != 7) check = (check ^ static_cast<uint32_t>(header[i])) * 0x01000193u;
    }
    std::memcpy(header + 28, &check, 4);
  };
  reports = drive(3, "int8", newer);
  EXPECT_THAT(reports[0].text, HasSubstr("payload version: rank 1 sent 2, rank 0 has 1"));
  for (const Report& report : reports) EXPECT_EQ(report.status.code(), StatusCode::peer_mismatch) << report.text;
  expect_untouched_after_both_collectives(reports);
}

// Specs with payloads of different sizes, or another number of elements, differ in the descriptor of the collective
// already.
TEST(Failure, AnotherSizeIsAMismatchOnAll) {
  for (const bool other_count : {false, true}) {
    Ranks ranks(3, 5000, DType::f32);
    for (size_t r = 0; r < 3; ++r) ranks.gradients[r] = Gradient::of(Gen::gaussian, 5000, r, DType::f32);
    const Ranks before = ranks;
    const std::vector<Outcome> outcomes =
        exchange(ranks, default_candidate(spec_of("int8")), Feedback::none, 1, [&](ExchangeArgs& args) {
          if (args.shape.rank != 1) return;
          if (other_count) {
            args.shape.count = args.gradient.count = 1000;
          } else {
            args.shape.candidate.codec = spec_of("bf16");
          }
        });
    for (size_t r = 0; r < 3; ++r) {
      EXPECT_EQ(outcomes[r].status.code(), StatusCode::peer_mismatch);
      EXPECT_THAT(outcomes[r].why.text,
                  AllOf(HasSubstr("by two_shot, all_to_all: "), HasSubstr("rank 1 passed count ")));
      EXPECT_EQ(ranks.gradients[r], before.gradients[r]);
    }
  }
}

TEST(Failure, DifferentExchangesAreAMismatchOnAll) {
  Ranks ranks(2, 1000, DType::f32);
  for (size_t r = 0; r < 2; ++r) ranks.gradients[r] = Gradient::of(Gen::gaussian, 1000, r, DType::f32);
  const std::vector<Outcome> outcomes = exchange(ranks, dense_candidate(), Feedback::none, 1, [&](ExchangeArgs& args) {
    if (args.shape.rank == 1) args.shape.candidate = default_candidate(spec_of("int8"));
  });
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.status.code(), StatusCode::peer_mismatch);
    EXPECT_THAT(outcome.why.text, HasSubstr("rank 1 called all_to_all, rank 0 called all_reduce"));
  }
}

// COL-7: the others learn which operation waited, for how long, and for whom.
TEST(Failure, AVanishedRankIsNamedWithTheOperation) {
  for (const char* text : {"none", "int8"}) {
    run_ranks(3, [&](Communicator& comm) {
      if (comm.rank() == 1) return;
      std::vector<float> g(1000, 1.0f);
      ExchangeArgs args;
      args.shape = {default_candidate(spec_of(text)), g.size(), DType::f32, comm.rank(), 3, 1};
      args.gradient = {g.data(), g.size(), DType::f32};
      std::vector<std::byte> workspace(exchange_workspace_bytes(args.shape));
      args.workspace = workspace;
      Message why;
      EXPECT_EQ(run_exchange(comm, args, 1.0, {}, nullptr, &why).code(), StatusCode::timeout);
      EXPECT_THAT(why.text,
                  testing::MatchesRegex(
                      std::string(text) == "none"
                          ? "none by all_reduce, all_reduce: all_reduce: timeout after .* s: rank 1 had not arrived"
                          : "int8 by two_shot, all_to_all: all_to_all: timeout after .* s: rank 1 had not arrived"));
    });
  }
}

// An all_reduce has no payload to carry an error: the failing rank stays away, and the others find that out by their
// deadline.
TEST(Failure, AFailingRankStaysOutOfAnAllReduce) {
  run_ranks(2, [](Communicator& comm) {
    std::vector<float> g(10, 1.0f);
    ExchangeArgs args;
    args.shape = {dense_candidate(), g.size(), DType::f32, comm.rank(), 2, 1};
    args.gradient = {g.data(), g.size(), DType::f32};
    if (comm.rank() == 0) {
      EXPECT_EQ(run_exchange(comm, args, 1.0, {}, nullptr, nullptr).code(), StatusCode::timeout);
      return;
    }
    ExchangeMachine machine;
    CollectiveCall call;
    ASSERT_TRUE(machine.begin(args).ok());
    machine.fail(StatusCode::io_error);
    EXPECT_EQ(machine.next(&call).code(), StatusCode::io_error);
    EXPECT_EQ(call.kind, Collective::none);
    EXPECT_THAT(machine.last_error(), HasSubstr("none over all_reduce: rank 1 failed: input or output error"));
  });
}

TEST(Failure, TheShapeMustBelongToTheCommunicator) {
  run_ranks(2, [](Communicator& comm) {
    float g = 1;
    ExchangeArgs args;
    args.shape = {dense_candidate(), 1, DType::f32, 1 - comm.rank(), 2, 1};
    args.gradient = {&g, 1, DType::f32};
    Message why;
    EXPECT_EQ(run_exchange(comm, args, 1, {}, nullptr, &why).code(), StatusCode::invalid_argument);
    EXPECT_THAT(why.text, HasSubstr("of 2, the communicator of rank"));
  });
}

}  // namespace
}  // namespace gradgate
