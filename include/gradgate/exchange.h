// Exchanges: how a gradient is reduced with a codec, as state machines without I/O. begin() encodes, next() hands out
// one collective after the other, the driver performs it and calls again. The same machine serves C++ communicators,
// streams, and torch.distributed through the C ABI. Conservation law and error feedback: docs/determinism.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "gradgate/codec.h"
#include "gradgate/communicator.h"

namespace gradgate {

/// One way to reduce a bucket: a codec and the collective that carries its payload.
struct Candidate {
  CodecSpec codec;
  Exchange exchange = Exchange::all_reduce;
  Exchange between =
      Exchange::all_reduce;  ///< hierarchical: what runs between nodes; all_reduce for every other exchange

  friend bool operator==(const Candidate&, const Candidate&) = default;
};
/// The dense reduction: codec none over all_reduce.
constexpr Candidate dense_candidate() noexcept { return {}; }
/// A codec over the exchange that it uses unless told otherwise (CodecInfo::exchange).
GRADGATE_API Candidate default_candidate(const CodecSpec& codec) noexcept;
/// Parses `codec[@exchange]`, e.g. "int8", "chunk-topk:8/1024@all_gather", "int8@hierarchical" (the codec's own
/// exchange between nodes), "int8@hierarchical/all_gather". On failure `why` (optional) names the part, its value and
/// what is accepted.
GRADGATE_API Status parse_candidate(std::string_view text, Candidate* candidate, Message* why) noexcept;
/// Canonical text of a candidate; the exchange is named only where it is not the codec's default.
GRADGATE_API Message format_candidate(const Candidate& candidate) noexcept;

/// How the residual takes part.
enum class Feedback : uint8_t {
  none = 0,   ///< plain g; a residual, if any, is neither read nor written (dense steps with e = 0, probes)
  apply = 1,  ///< x = g + e, e becomes what was not sent
  flush = 2   ///< dense only: sends g + e, all of it; e becomes the rounding error of the cast
};

/// Everything that is known before the gradient is: sizes follow from it alone.
struct ExchangeShape {
  Candidate candidate;
  size_t count = 0;  ///< elements of the bucket, any n ≥ 0
  DType dtype = DType::f32;
  int rank = 0, ranks = 1;
  unsigned width = 1;      ///< executor threads
  int ranks_per_node = 0;  ///< hierarchical: consecutive ranks share a node; must divide ranks
  bool device = false;     ///< the memory is the current CUDA device's (ExchangeArgs::device)
};

struct DevicePlace;  // gradgate/device_exchange.h

struct ExchangeArgs {
  ExchangeShape shape;
  Vec gradient;  ///< in: this rank's gradient; out: the average over ranks, in its dtype. Changed only by the last
                 ///< next(). (The dense all_reduce works in place: it is scaled by begin().)
  float* residual = nullptr;  ///< shape.count elements, sum units; required for Feedback::apply and flush
  Feedback feedback = Feedback::none;
  Bytes workspace;  ///< at least exchange_workspace_bytes(shape), any alignment
  Seed seed;        ///< key, tensor and step; stream and first are set by the exchange
  Executor executor;
  bool divide = false;                  ///< all_reduce: scale by division by N instead of multiplication with 1/N
  uint32_t* threshold = nullptr;        ///< topk: as in EncodeArgs, one per vector; in the memory of the gradient
  const DevicePlace* device = nullptr;  ///< shape.device: where and how; must outlive the machine
};

/// Whose collective it is: of all ranks, of the ranks of this node, or of the ranks that have this rank's place in
/// their nodes.
enum class Tier : uint8_t { all, node, between };

namespace comm {
struct Shards;
struct Slots;
}  // namespace comm

/// One collective the driver must perform. kind == none: the exchange is complete.
struct CollectiveCall {
  Collective kind = Collective::none;
  const void* send = nullptr;
  void* recv = nullptr;
  size_t count = 0;  ///< as in Communicator: per block, or of the vector for all_reduce
  DType dtype = DType::u8;
  Tier tier = Tier::all;
};

/// Bytes of workspace; 0 is possible. Exact and a pure function of the shape.
GRADGATE_API size_t exchange_workspace_bytes(const ExchangeShape& shape) noexcept;
/// Bytes that stand for M/r when the exchange is priced: the size of all ranks' slots of one phase (two_shot: ranks ×
/// payload of a shard), of one rank's payload for all_gather, of what is summed for all_reduce (the vector, or the
/// payload's values and the witness in front of them); 0 when the codec does not take the dtype or does not travel by
/// the exchange.
GRADGATE_API size_t exchange_wire_bytes(const ExchangeShape& shape) noexcept;

/// The state machine. No allocation, no I/O, no clock; about 500 bytes, movable between calls.
class GRADGATE_API ExchangeMachine {
 public:
  /// Checks the arguments and encodes. An error (invalid_argument, unsupported, workspace_too_small) leaves everything
  /// untouched and the machine idle. After a failure to encode begin() is ok and the machine runs on: it sends error
  /// payloads and the last next() fails on every rank.
  Status begin(const ExchangeArgs& args) noexcept;
  /// First call: the first collective. Later calls: consumes the collective just performed and gives the next one, or
  /// kind none when the gradient holds the average. Only the last call fails, and then on every rank: the rank that
  /// failed gets its own code, the others peer_failed; peer_mismatch where steps or specs differ; bad_payload on a rank
  /// that received one. The gradient is then untouched, the residual is not.
  Status next(CollectiveCall* call) noexcept;
  /// Fails this rank's part on purpose (a rank that ran out of memory, a test): the next payload it sends is an error
  /// payload (over all_reduce: a witness that says so). The dense all_reduce carries neither: its first next() fails
  /// here, and the peers' wait for this rank ends at their deadline.
  void fail(StatusCode code) noexcept;

  /// Elements of x that were not finite on this rank, both stages. The dense all_reduce does not look.
  uint64_t non_finite() const noexcept { return non_finite_; }
  /// After a failure: every rank knows of it, since it was made or told before the last collective. False for damage
  /// that only its receiver saw.
  bool told() const noexcept { return told_; }
  /// Text of the last error: stage, peer, both values.
  const char* last_error() const noexcept { return error_.text; }

 private:
  enum class Phase : uint8_t { idle, ready, stage1, stage2, stage3, done };
  Status start(const ExchangeArgs& args, int divisor) noexcept;
  Status begin_dense() noexcept;
  Status next_dense(CollectiveCall* call) noexcept;
  bool dense() const noexcept;
  void begin_all_reduce() noexcept;
  Status next_all_reduce(CollectiveCall* call) noexcept;
  Status decode_sums() noexcept;
  void begin_hierarchical() noexcept;
  ExchangeMachine* between_nodes() const noexcept;
  void begin_between_nodes() noexcept;
  Status next_hierarchical(CollectiveCall* call) noexcept;
  void close_block() noexcept;
  void open_blocks() noexcept;
  void begin_all_gather() noexcept;
  void encode_whole(uint32_t stream, Bytes slot, Bytes work) noexcept;
  Status next_all_gather(CollectiveCall* call) noexcept;
  void begin_two_shot() noexcept;
  Status next_two_shot(CollectiveCall* call) noexcept;
  void send_shards(CollectiveCall* call) noexcept;
  void send_sum(CollectiveCall* call) noexcept;
  Status receive_sums() noexcept;
  void inspect_slots(int stage, const comm::Slots& slots, int skip, const comm::Shards* shards, size_t count,
                     Bytes work) noexcept;
  bool inspect(int stage, int peer, size_t count, ConstBytes payload) noexcept;
  void blame(Status status, const char* text) noexcept;

  ExchangeArgs args_;
  int divisor_ = 1;  ///< the average is the sum divided by it: ranks, or those of all nodes
  Phase phase_ = Phase::idle;
  Status failed_;  ///< first failure seen by this rank
  uint64_t non_finite_ = 0;
  bool told_ = false;
  Message error_;
};

/// Seconds one exchange took on this rank, by part.
struct ExchangeTimes {
  double encode_s = 0, transfer_s = 0, decode_s = 0;
  bool transfer_seen = true;  ///< false: it had ended, unseen, before it was waited for; transfer_s is then too long
  uint64_t non_finite = 0;    ///< ExchangeMachine::non_finite()
  bool told = false;          ///< ExchangeMachine::told(), after a failure
};

/// Codec speed that is charged on a virtual clock, in bytes of the gradient per second of encoding and of decoding (0:
/// free). A real clock measures instead and ignores this.
struct CodecRates {
  double encode_bytes_per_s = 0, decode_bytes_per_s = 0;
};

/// The two communicators of a hierarchical exchange, split off one.
struct NodeTiers {
  std::unique_ptr<Communicator> node, between;
};
/// Collective. Consecutive ranks form nodes of ranks_per_node. invalid_argument, with both numbers in `why`, where the
/// nodes would not be equal.
GRADGATE_API Status split_nodes(Communicator& comm, int ranks_per_node, double timeout_s, NodeTiers* tiers,
                                Message* why) noexcept;
/// Ranks on this machine as the launcher says: OMPI_COMM_WORLD_LOCAL_SIZE, LOCAL_WORLD_SIZE (torchrun),
/// MPI_LOCALNRANKS, SLURM_NTASKS_PER_NODE, the first that is a number; 0 where none is.
GRADGATE_API int launcher_ranks_per_node() noexcept;

/// Drives a machine over a communicator: the C++ issuer. Any failure names the operation in `why` (optional, as is
/// `times`). Every collective may wait timeout_s for its peers. A hierarchical exchange needs `tiers`. encode_s is
/// begin() and, for two_shot, the owner's sum; decode_s is what follows the last collective. A dense all_reduce is
/// transfer as a whole, its scaling included.
GRADGATE_API Status run_exchange(Communicator& comm, const ExchangeArgs& args, double timeout_s,
                                 const CodecRates& rates, ExchangeTimes* times, Message* why,
                                 const NodeTiers* tiers = nullptr) noexcept;

/// Times the codec work of one exchange without any communication and without changing gradient or residual: this
/// rank's payloads stand in for its peers'. `scratch` holds exchange_shadow_bytes(shape) bytes, any alignment. Both
/// times are split as in run_exchange(); a virtual clock is charged by the same rates. Dense: nothing to time, both are
/// 0. With Feedback::apply a null residual stands for zeros; args.workspace is not used.
GRADGATE_API size_t exchange_shadow_bytes(const ExchangeShape& shape) noexcept;
GRADGATE_API Status shadow_exchange(Communicator& clock, const ExchangeArgs& args, Bytes scratch,
                                    const CodecRates& rates, ExchangeTimes* times) noexcept;

}  // namespace gradgate
