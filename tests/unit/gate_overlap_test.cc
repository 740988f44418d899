// The overlapped data-parallel step, against schedules worked out by hand.
#include <gtest/gtest.h>

#include <vector>

#include "gate/models/overlap.h"

namespace gradgate::gate {
namespace {

using Buckets = std::vector<OverlapBucket>;

TEST(GateOverlap, HiddenTransfersCostNothing) {
  const Buckets buckets = {{1, 0, 1, 0}, {2, 0, 1, 0}, {3, 0, 1, 0}};
  const OverlapStep step = overlapped_step(10, buckets, EncodeOn::wire);
  EXPECT_EQ(step.finish_s, 4);
  EXPECT_EQ(step.step_s, 10);
  EXPECT_EQ(step.exposed_s, 0);
  EXPECT_EQ(step.busy_s, 3);
}

TEST(GateOverlap, TheWireIsAQueue) {
  // 1 → 4, then 4 → 7 (ready at 2), then 7 → 10 (ready at 3): 7 beyond the backward pass.
  const Buckets buckets = {{1, 0, 3, 0}, {2, 0, 3, 0}, {3, 0, 3, 0}};
  const OverlapStep step = overlapped_step(3, buckets, EncodeOn::wire);
  EXPECT_EQ(step.finish_s, 10);
  EXPECT_EQ(step.exposed_s, 7);
  // The wire idles until the last bucket is ready.
  EXPECT_EQ(overlapped_step(9, Buckets{{1, 0, 3, 0}, {9, 0, 2, 0}}, EncodeOn::wire).step_s, 11);
}

TEST(GateOverlap, EncodingIsChargedWhereItRuns) {
  const Buckets buckets = {{1, 0.5, 1, 0.25}, {2, 0.5, 1, 0.25}};
  const OverlapStep wire = overlapped_step(2, buckets, EncodeOn::wire);
  EXPECT_EQ(wire.finish_s, 1 + 1.75 + 1.75);
  EXPECT_EQ(wire.compute_s, 2);
  const OverlapStep compute = overlapped_step(2, buckets, EncodeOn::compute);
  EXPECT_EQ(compute.compute_s, 3) << "the backward pass waits for both encodings";
  EXPECT_EQ(compute.finish_s, 3 + 1.25) << "ready at 1.5 and 3, the first done at 2.75";
  EXPECT_EQ(compute.exposed_s, 2.25);
  EXPECT_EQ(compute.busy_s, 2.5);
  // Encoding that hides nothing costs compute even where the wire has time.
  EXPECT_EQ(overlapped_step(10, Buckets{{1, 2, 0.5, 0}}, EncodeOn::compute).exposed_s, 2);
  EXPECT_EQ(overlapped_step(10, Buckets{{1, 2, 0.5, 0}}, EncodeOn::wire).exposed_s, 0);
}

TEST(GateOverlap, NoBucketsAndEvenReadiness) {
  EXPECT_EQ(overlapped_step(5, {}, EncodeOn::compute).step_s, 5);
  EXPECT_EQ(even_ready_time(2, 8, 0, 6), 2);
  EXPECT_EQ(even_ready_time(2, 8, 3, 6), 5);
  EXPECT_EQ(even_ready_time(2, 8, 6, 6), 8);
  EXPECT_EQ(even_ready_time(2, 8, 0, 0), 8);
}

}  // namespace
}  // namespace gradgate::gate
