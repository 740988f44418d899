#include "integration/mpi/moves.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "integration/comm/rank_sum.h"
#include "kernels/cpu/float_env.h"

namespace gradgate::mpi {
namespace {

std::byte* bytes_of(void* p) noexcept { return static_cast<std::byte*>(p); }
const std::byte* bytes_of(const void* p) noexcept { return static_cast<const std::byte*>(p); }

/// The same piece of every rank's block: `piece` bytes, one block apart. MPI keeps what operations in flight need.
class Strided {
 public:
  Strided(size_t piece, size_t block) noexcept {
    MPI_Datatype flat;
    MPI_Type_contiguous(static_cast<int>(piece), MPI_BYTE, &flat);
    MPI_Type_create_resized(flat, 0, static_cast<MPI_Aint>(block), &type_);
    MPI_Type_commit(&type_);
    MPI_Type_free(&flat);
  }
  ~Strided() { MPI_Type_free(&type_); }
  Strided(const Strided&) = delete;
  Strided& operator=(const Strided&) = delete;
  MPI_Datatype type() const noexcept { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

}  // namespace

Moves::Moves(Hub& hub, const Limits& limits) : hub_(hub), limits_(limits), sources_(ranks()) {
  for (Slot& slot : slots_) {
    for (auto* list : {&slot.counts, &slot.displacements, &slot.own_counts, &slot.own_displacements})
      list->resize(ranks());
  }
}

Status Moves::move(const Call& call) noexcept {
  const kernels::cpu::IeeeScope ieee;  // sums must not depend on whether this rank's thread flushes subnormals
  if (call.count == 0) return {};
  switch (call.op) {
    case Collective::all_reduce:
      return call.count <= limits_.small_bytes / ranks() / dtype_bytes(call.dtype) ? all_reduce_small(call)
                                                                                   : all_reduce(call);
    case Collective::reduce_scatter:
      return reduce_scatter(call);
    case Collective::all_gather:
      return all_gather(call);
    case Collective::all_to_all:
      return all_to_all(call);
    case Collective::broadcast:
      return broadcast(call);
    case Collective::barrier:
    case Collective::none:
      break;
  }
  return {};
}

Status Moves::reserve(Slot* slot, size_t bytes) noexcept {
  if (slot->bytes >= bytes) return {};
  slot->blocks.reset(new (std::nothrow) std::byte[bytes]);
  slot->bytes = slot->blocks ? bytes : 0;
  return slot->blocks ? Status() : hub_.out_of_memory();
}

void Moves::sum(const std::byte* blocks, size_t block_bytes, std::byte* to, size_t count, DType dtype) noexcept {
  for (size_t r = 0; r < ranks(); ++r) sources_[r] = blocks + r * block_bytes;
  void* dest = to;
  comm::sum_over_ranks(sources_, 0, {&dest, 1}, 0, count, dtype);
}

// Start-up time is all there is: one all-gather, and every rank adds the same numbers in the same order.
Status Moves::all_reduce_small(const Call& call) noexcept {
  const size_t bytes = call.count * dtype_bytes(call.dtype);
  Slot& slot = slots_[0];
  GRADGATE_TRY(reserve(&slot, bytes * ranks()));
  const int n = static_cast<int>(bytes);
  GRADGATE_TRY(
      hub_.check(MPI_Iallgather(call.send, n, MPI_BYTE, slot.blocks.get(), n, MPI_BYTE, hub_.comm(), &slot.gather),
                 "MPI_Iallgather"));
  GRADGATE_TRY(wait(&slot.gather));
  sum(slot.blocks.get(), bytes, bytes_of(call.recv), call.count, call.dtype);
  return {};
}

// Sends every rank its part of elements first … first + count − 1, and receives this rank's part from all.
Status Moves::scatter_segment(const Call& call, size_t first, size_t count, Slot* slot) noexcept {
  const size_t element = dtype_bytes(call.dtype), each = (count + ranks() - 1) / ranks();
  for (size_t r = 0; r < ranks(); ++r) {
    const size_t begin = std::min(count, r * each), size = std::min(each, count - begin);
    slot->counts[r] = static_cast<int>(size * element);
    slot->displacements[r] = static_cast<int>(begin * element);
  }
  const int own = slot->counts[static_cast<size_t>(hub_.rank())];
  for (size_t r = 0; r < ranks(); ++r) {
    slot->own_counts[r] = own;
    slot->own_displacements[r] = static_cast<int>(r) * own;
  }
  GRADGATE_TRY(reserve(slot, each * element * ranks()));
  return hub_.check(MPI_Ialltoallv(bytes_of(call.send) + first * element, slot->counts.data(),
                                   slot->displacements.data(), MPI_BYTE, slot->blocks.get(), slot->own_counts.data(),
                                   slot->own_displacements.data(), MPI_BYTE, hub_.comm(), &slot->scatter),
                    "MPI_Ialltoallv");
}

// Segment by segment: exchange parts, add this rank's part, gather the sums. The next segment's exchange is on its way
// while this one is added and gathered. In place is fine: a segment is read by the exchange and written after it.
Status Moves::all_reduce(const Call& call) noexcept {
  const size_t element = dtype_bytes(call.dtype), segment = std::max(limits_.segment_bytes / element, ranks());
  const auto count_at = [&](size_t first) { return std::min(segment, call.count - first); };
  GRADGATE_TRY(scatter_segment(call, 0, count_at(0), &slots_[0]));
  size_t turn = 0;
  for (size_t first = 0; first < call.count; first += segment, ++turn) {
    Slot &slot = slots_[turn % 2], &other = slots_[(turn + 1) % 2];
    GRADGATE_TRY(wait(&slot.scatter));
    GRADGATE_TRY(wait(&other.gather));
    if (const size_t next = first + count_at(first); next < call.count)
      GRADGATE_TRY(scatter_segment(call, next, count_at(next), &other));
    const auto me = static_cast<size_t>(hub_.rank());
    const auto own = static_cast<size_t>(slot.counts[me]);
    std::byte* const to = bytes_of(call.recv) + first * element;
    sum(slot.blocks.get(), own, to + slot.displacements[me], own / element, call.dtype);
    GRADGATE_TRY(hub_.check(MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, to, slot.counts.data(),
                                            slot.displacements.data(), MPI_BYTE, hub_.comm(), &slot.gather),
                            "MPI_Iallgatherv"));
  }
  return wait(&slots_[(turn + 1) % 2].gather);
}

Status Moves::reduce_scatter(const Call& call) noexcept {
  const size_t element = dtype_bytes(call.dtype), block = call.count * element;
  const size_t piece = std::max<size_t>(limits_.segment_bytes / element / ranks(), 1);
  const auto scatter = [&](size_t first, Slot* slot) -> Status {
    const size_t bytes = std::min(piece, call.count - first) * element;
    GRADGATE_TRY(reserve(slot, bytes * ranks()));
    const Strided strided(bytes, block);
    return hub_.check(MPI_Ialltoall(bytes_of(call.send) + first * element, 1, strided.type(), slot->blocks.get(),
                                    static_cast<int>(bytes), MPI_BYTE, hub_.comm(), &slot->scatter),
                      "MPI_Ialltoall");
  };
  GRADGATE_TRY(scatter(0, &slots_[0]));
  size_t turn = 0;
  for (size_t first = 0; first < call.count; first += piece, ++turn) {
    Slot &slot = slots_[turn % 2], &other = slots_[(turn + 1) % 2];
    const size_t count = std::min(piece, call.count - first);
    GRADGATE_TRY(wait(&slot.scatter));
    if (first + count < call.count) GRADGATE_TRY(scatter(first + count, &other));
    sum(slot.blocks.get(), count * element, bytes_of(call.recv) + first * element, count, call.dtype);
  }
  return {};
}

Status Moves::all_gather(const Call& call) noexcept {
  const size_t block = call.count * dtype_bytes(call.dtype);
  const bool in_place = call.send == bytes_of(call.recv) + static_cast<size_t>(hub_.rank()) * block;
  for (size_t first = 0; first < block; first += limits_.call_bytes) {
    const size_t piece = std::min(limits_.call_bytes, block - first);
    const Strided strided(piece, block);
    const void* const send = in_place ? MPI_IN_PLACE : bytes_of(call.send) + first;
    Slot& slot = slots_[0];
    GRADGATE_TRY(hub_.check(MPI_Iallgather(send, static_cast<int>(piece), MPI_BYTE, bytes_of(call.recv) + first, 1,
                                           strided.type(), hub_.comm(), &slot.gather),
                            "MPI_Iallgather"));
    GRADGATE_TRY(wait(&slot.gather));
  }
  return {};
}

Status Moves::all_to_all(const Call& call) noexcept {
  const size_t block = call.count * dtype_bytes(call.dtype);
  for (size_t first = 0; first < block; first += limits_.call_bytes) {
    const Strided strided(std::min(limits_.call_bytes, block - first), block);
    Slot& slot = slots_[0];
    GRADGATE_TRY(hub_.check(MPI_Ialltoall(bytes_of(call.send) + first, 1, strided.type(), bytes_of(call.recv) + first,
                                          1, strided.type(), hub_.comm(), &slot.scatter),
                            "MPI_Ialltoall"));
    GRADGATE_TRY(wait(&slot.scatter));
  }
  return {};
}

Status Moves::broadcast(const Call& call) noexcept {
  const size_t bytes = call.count * dtype_bytes(call.dtype);
  for (size_t first = 0; first < bytes; first += limits_.call_bytes) {
    const int piece = static_cast<int>(std::min(limits_.call_bytes, bytes - first));
    Slot& slot = slots_[0];
    GRADGATE_TRY(hub_.check(
        MPI_Ibcast(bytes_of(call.recv) + first, piece, MPI_BYTE, call.root, hub_.comm(), &slot.gather), "MPI_Ibcast"));
    GRADGATE_TRY(wait(&slot.gather));
  }
  return {};
}

}  // namespace gradgate::mpi
