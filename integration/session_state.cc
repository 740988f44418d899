// Checkpoints of a session: one file per rank, because residuals belong to ranks. Layout (little-endian, 8-byte words):
//   StateHeader | gate state, padded to 8 | per parameter: ParamRecord, then count floats padded to 8 if it has a
//   residual | FNV-1a of all before
// Everything is read and checked before anything of the session changes.
#include <cmath>
#include <cstring>
#include <unordered_map>

#include "integration/session_impl.h"

namespace gradgate {
namespace {

struct StateHeader {
  char magic[8] = {'G', 'G', 'S', 'T', 'A', 'T', 'E', '2'};
  uint64_t rank = 0, ranks = 0, step = 0, seed = 0, params = 0, layout = 0, gate_bytes = 0;
  double gradient_scale = 1;
};
struct ParamRecord {
  uint64_t param_id = 0, count = 0, flags = 0;
};
constexpr uint64_t kHasResidual = 1, kPending = 2, kInShards = 4;

constexpr size_t padded(size_t bytes) { return (bytes + 7) / 8 * 8; }

/// Reads a buffer front to back; every read is checked.
class Reader {
 public:
  explicit Reader(ConstBytes bytes) : bytes_(bytes) {}
  bool read(void* out, size_t size) {
    const std::byte* from = take(size);
    if (from == nullptr) return false;
    if (size > 0) std::memcpy(out, from, size);
    return true;
  }
  const std::byte* take(size_t size) {
    if (size > bytes_.size() - at_) return nullptr;
    const std::byte* p = bytes_.data() + at_;
    at_ += size;
    return p;
  }
  size_t left() const { return bytes_.size() - at_; }

 private:
  ConstBytes bytes_;
  size_t at_ = 0;
};

}  // namespace

size_t SessionImpl::state_bytes() const noexcept {
  size_t bytes = sizeof(StateHeader) + padded(gate_.state_bytes()) + sizeof(uint64_t);
  for (const Bucket& bucket : buckets_) {
    for (const ParamSlice& slice : bucket.slices)
      bytes += sizeof(ParamRecord) + (bucket.has_residual ? padded(slice.count * sizeof(float)) : 0);
  }
  return bytes;
}

Status SessionImpl::save_state(Bytes out, size_t* written) const noexcept {
  if (failed_) return refuse(StatusCode::bad_state, "this session failed before: %s", error_.text);
  if (!has_layout_ || next_bucket_ != 0 || unplanned_)
    return refuse(StatusCode::bad_state, "save_state before set_layout or within a step; call it between steps");
  if (unsettled_) return refuse(StatusCode::bad_state, "save_state of a step that still runs; synchronize() first");
  const size_t needed = state_bytes();
  if (out.size() < needed) {
    return refuse({StatusCode::payload_too_small, static_cast<int64_t>(needed)}, "save_state got %zu bytes, needs %zu",
                  out.size(), needed);
  }
  std::byte* at = out.data();
  const auto put = [&](const void* data, size_t size) {
    if (size > 0) std::memcpy(at, data, size);
    std::memset(at + size, 0, padded(size) - size);
    at += padded(size);
  };
  StateHeader header;
  header.rank = static_cast<uint64_t>(comm_.rank());
  header.ranks = static_cast<uint64_t>(comm_.size());
  header.step = step_;
  header.seed = options_.seed;
  header.layout = layout_hash();
  header.gate_bytes = gate_.state_bytes();
  header.gradient_scale = gradient_scale_;
  for (const Bucket& bucket : buckets_) header.params += bucket.slices.size();
  put(&header, sizeof(header));
  if (const Status s = gate_.save({at, header.gate_bytes}); !s.ok())
    return refuse(s, "save_state: the gate could not be saved");
  std::memset(at + header.gate_bytes, 0, padded(header.gate_bytes) - header.gate_bytes);
  at += padded(header.gate_bytes);
  for (const Bucket& bucket : buckets_) {
    for (const ParamSlice& slice : bucket.slices) {
      const ParamRecord record{slice.param_id, slice.count,
                               (bucket.has_residual ? kHasResidual : 0) | (bucket.pending ? kPending : 0) |
                                   (bucket.in_shards ? kInShards : 0)};
      put(&record, sizeof(record));
      if (!bucket.has_residual) continue;
      const size_t bytes = slice.count * sizeof(float);
      GRADGATE_TRY(place_.read(at, residuals_.floats() + bucket.residual_offset + slice.offset, bytes));
      std::memset(at + bytes, 0, padded(bytes) - bytes);
      at += padded(bytes);
    }
  }
  const uint64_t hash = fnv1a64(out.data(), static_cast<size_t>(at - out.data()));
  put(&hash, sizeof(hash));
  if (written != nullptr) *written = needed;
  return {};
}

Status SessionImpl::load_state(ConstBytes state) noexcept {
  if (failed_) return refuse(StatusCode::bad_state, "this session failed before: %s", error_.text);
  if (!has_layout_ || next_bucket_ != 0 || unplanned_)
    return refuse(StatusCode::bad_state, "load_state before set_layout or within a step; call it between steps");
  GRADGATE_TRY(settle());
  try {
    struct Loaded {
      const std::byte* data;
      uint64_t count, flags;
    };
    std::unordered_map<uint64_t, Loaded> params;
    StateHeader header;
    const std::byte* gate_state = nullptr;
    Message why;
    Status status;

    // First what this rank thinks of its own file; then all ranks compare, so that either all load or none does.
    const auto reject = [&](StatusCode code, auto... text) {
      if (status.ok()) {
        status = code;
        why.format(text...);
      }
    };
    Reader reader(state);
    if (state.size() < sizeof(StateHeader) + sizeof(uint64_t) || !reader.read(&header, sizeof(header)) ||
        std::memcmp(header.magic, StateHeader{}.magic, sizeof(header.magic)) != 0) {
      reject(StatusCode::bad_payload, "not a gradgate state (%zu bytes)", state.size());
    } else {
      uint64_t hash = 0;
      std::memcpy(&hash, state.data() + state.size() - sizeof(hash), sizeof(hash));
      if (hash != fnv1a64(state.data(), state.size() - sizeof(hash)))
        reject(StatusCode::bad_payload, "damaged or truncated state (checksum)");
    }
    if (status.ok()) {
      if (header.ranks != static_cast<uint64_t>(comm_.size()))
        reject(StatusCode::peer_mismatch,
               "state of %llu ranks, this session has %d; flush() before saving and start without a state instead",
               static_cast<unsigned long long>(header.ranks), comm_.size());
      if (header.rank != static_cast<uint64_t>(comm_.rank()))
        reject(StatusCode::peer_mismatch, "state of rank %llu, this is rank %d",
               static_cast<unsigned long long>(header.rank), comm_.rank());
      if (!(header.gradient_scale > 0) || !std::isfinite(header.gradient_scale))
        reject(StatusCode::bad_payload, "gradient scale %g", header.gradient_scale);
      if (header.seed != options_.seed)
        reject(StatusCode::peer_mismatch, "state with seed %llu, this session has %llu",
               static_cast<unsigned long long>(header.seed), static_cast<unsigned long long>(options_.seed));
    }
    if (status.ok()) {
      gate_state = header.gate_bytes <= reader.left() ? reader.take(padded(header.gate_bytes)) : nullptr;
      if (gate_state == nullptr)
        reject(StatusCode::bad_payload, "gate state of %llu bytes does not fit",
               static_cast<unsigned long long>(header.gate_bytes));
      for (uint64_t i = 0; status.ok() && i < header.params; ++i) {
        ParamRecord record;
        if (!reader.read(&record, sizeof(record)) || record.count > state.size()) {
          reject(StatusCode::bad_payload, "parameter %llu does not fit", static_cast<unsigned long long>(i));
          break;
        }
        const std::byte* data = nullptr;
        if ((record.flags & kHasResidual) != 0) {
          data = reader.take(padded(record.count * sizeof(float)));
          if (data == nullptr)
            reject(StatusCode::bad_payload, "residual of parameter %llu does not fit",
                   static_cast<unsigned long long>(record.param_id));
          for (uint64_t e = 0; data != nullptr && e < record.count; ++e) {
            float value;
            std::memcpy(&value, data + e * sizeof(float), sizeof(float));
            if (!std::isfinite(value))
              reject(StatusCode::bad_payload, "residual of parameter %llu is not finite",
                     static_cast<unsigned long long>(record.param_id));
          }
        }
        params[record.param_id] = {data, record.count, record.flags};
      }
      if (status.ok() && reader.left() != sizeof(uint64_t))
        reject(StatusCode::bad_payload, "%zu bytes too many", reader.left());
    }
    size_t slices = 0;
    for (const Bucket& bucket : buckets_) {
      for (const ParamSlice& slice : bucket.slices) {
        ++slices;
        const auto found = params.find(slice.param_id);
        if (status.ok() && (found == params.end() || found->second.count != slice.count))
          reject(StatusCode::peer_mismatch, "parameter %llu has %zu elements here and %llu in the state",
                 static_cast<unsigned long long>(slice.param_id), slice.count,
                 static_cast<unsigned long long>(found == params.end() ? 0 : found->second.count));
        if (status.ok() && bucket.has_residual && found->second.data == nullptr &&
            (found->second.flags & kPending) != 0)
          reject(StatusCode::bad_payload, "parameter %llu has no residual",
                 static_cast<unsigned long long>(slice.param_id));
        if (status.ok() && !bucket.has_residual && (found->second.flags & kPending) != 0)
          reject(StatusCode::peer_mismatch,
                 "parameter %llu has a residual in the state but no codec with feedback here",
                 static_cast<unsigned long long>(slice.param_id));
      }
    }
    if (status.ok() && slices != params.size())
      reject(StatusCode::peer_mismatch, "the state has %zu parameters, this session %zu", params.size(), slices);

    const AgreedField fields[] = {
        agreed_field("state", "%s", status.ok() ? "accepted" : why.text),
        agreed_field("step", "%llu", static_cast<unsigned long long>(header.step)),
        agreed_field("same layout", "%d", header.layout == layout_hash() ? 1 : 0),
    };
    Message disagreement;
    const Status agreed = agree_on(control(), fields, options_.timeout_s, &disagreement);
    if (!status.ok()) return refuse(status, "load_state: %s", why.text);
    if (!agreed.ok()) return refuse(agreed, "load_state: %s", disagreement.text);

    // The gate first: it is the only part that can still say no, and does so on every rank alike.
    bool gate_kept = false;
    if (header.layout == layout_hash()) {
      if (const Status s = gate_.load({gate_state, header.gate_bytes}); s.ok()) {
        gate_kept = true;
      } else if (s.code() != StatusCode::peer_mismatch) {
        return refuse(s, "load_state: damaged gate state");
      }
    }
    bool any_pending = false;
    for (Bucket& bucket : buckets_) {
      bucket.pending = false;
      bucket.in_shards = true;  // where another layout left any of it elsewhere, all of it goes out first
      for (const ParamSlice& slice : bucket.slices) {
        const Loaded& loaded = params[slice.param_id];
        bucket.pending = bucket.pending || (loaded.flags & kPending) != 0;
        bucket.in_shards = bucket.in_shards && gate_kept && (loaded.flags & kInShards) != 0;
        if (!bucket.has_residual) continue;
        float* to = residuals_.floats() + bucket.residual_offset + slice.offset;
        const size_t bytes = slice.count * sizeof(float);
        GRADGATE_TRY(loaded.data != nullptr ? place_.write(to, loaded.data, bytes) : place_.zero(to, bytes));
      }
      any_pending = any_pending || bucket.pending;
    }
    step_ = header.step;
    gradient_scale_ = header.gradient_scale;
    timed_step_ = false;
    flush_ = false;
    if (!gate_kept) {
      GRADGATE_TRY(make_gate());
      flush_ = any_pending &&
               options_.mode ==
                   Mode::automatic;  // the gate starts over with dense steps: the first one sends what is pending
      Message text;
      text.format(
          "gradgate: step %llu state loaded into another layout or configuration: residuals kept, decisions start over",
          static_cast<unsigned long long>(step_));
      say(text);
    }
    return {};
  } catch (const std::bad_alloc&) {
    return refuse(StatusCode::out_of_memory, "load_state: out of memory");
  }
}

}  // namespace gradgate
