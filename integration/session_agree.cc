// Things all ranks must find out together: whether they were configured alike, and how fast the link between them is.
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <vector>

#include "gate/fit.h"
#include "integration/session_impl.h"

namespace gradgate {

AgreedField agreed_field(const char* name, const char* format, ...) noexcept {
  AgreedField field;
  std::snprintf(field.name, sizeof(field.name), "%s", name);
  va_list list;
  va_start(list, format);
  const int length = std::vsnprintf(field.value, sizeof(field.value), format, list);
  va_end(list);
  if (length >= static_cast<int>(sizeof(field.value))) {
    // Too long to be compared as text: its end becomes a hash of the whole.
    char whole[1024];
    va_start(list, format);
    std::vsnprintf(whole, sizeof(whole), format, list);
    va_end(list);
    std::snprintf(field.value + 88, sizeof(field.value) - 88, "… %016llx",
                  static_cast<unsigned long long>(fnv1a64(whole, std::strlen(whole))));
  }
  return field;
}

Status agree_on(Communicator& comm, std::span<const AgreedField> fields, double timeout_s, Message* why) noexcept {
  const size_t ranks = static_cast<size_t>(comm.size());
  if (ranks == 1) return {};
  try {
    std::vector<AgreedField> all(ranks * fields.size());
    if (const Status s =
            comm.all_gather(fields.data(), all.data(), fields.size_bytes(), DType::u8, {}, Deadline::after(timeout_s));
        !s.ok()) {
      why->format("comparing the ranks' settings: %s", comm.last_error());
      return s;
    }
    for (size_t f = 0; f < fields.size(); ++f) {
      for (size_t r = 1; r < ranks; ++r) {
        const AgreedField& first = all[f];
        const AgreedField& other = all[r * fields.size() + f];
        if (std::strncmp(first.value, other.value, sizeof(first.value)) == 0) continue;
        why->format("ranks disagree: %s is '%s' on rank 0 and '%s' on rank %zu", first.name, first.value, other.value,
                    r);
        return StatusCode::peer_mismatch;
      }
    }
    return {};
  } catch (const std::bad_alloc&) {
    why->format("out of memory while comparing the ranks' settings");
    return StatusCode::out_of_memory;
  }
}

Status probe_link(Communicator& comm, double timeout_s, gate::LinkModel* link, Message* why) noexcept {
  using gate::ProbeCollective;
  *link = {};
  const size_t ranks = static_cast<size_t>(comm.size());
  if (ranks == 1) return {};
  try {
    size_t largest = 0;
    for (const gate::ProbePoint& point : gate::kProbe) largest = std::max<size_t>(largest, point.bytes);
    std::vector<float> send(largest / sizeof(float) + ranks * 4, 1.0f), recv(send.size() + ranks * 4);
    std::vector<double> mine;
    for (const gate::ProbePoint& point : gate::kProbe) {
      const size_t per_rank =
          (point.bytes / sizeof(float) + ranks - 1) / ranks;  // elements, so that the vector is a multiple of the ranks
      for (int i = 0; i < point.warmups + point.repetitions; ++i) {
        const Deadline deadline = Deadline::after(timeout_s);
        Status s = comm.barrier({}, deadline);
        const double start = comm.now();
        if (s.ok()) {
          switch (point.collective) {
            case ProbeCollective::all_reduce:
              s = comm.all_reduce_sum(send.data(), recv.data(), per_rank * ranks, DType::f32, {}, deadline);
              break;
            case ProbeCollective::all_gather:
              s = comm.all_gather(send.data(), recv.data(), per_rank, DType::f32, {}, deadline);
              break;
            case ProbeCollective::all_to_all:
              s = comm.all_to_all(send.data(), recv.data(), per_rank, DType::f32, {}, deadline);
              break;
          }
        }
        if (!s.ok()) {
          why->format("probing the link: %s", comm.last_error());
          return s;
        }
        if (i >= point.warmups) mine.push_back(comm.now() - start);
      }
    }
    std::vector<double> all(mine.size() * ranks);
    if (const Status s =
            comm.all_gather(mine.data(), all.data(), mine.size(), DType::f64, {}, Deadline::after(timeout_s));
        !s.ok()) {
      why->format("probing the link: %s", comm.last_error());
      return s;
    }
    if (!gate::fit_probe(all, static_cast<uint32_t>(ranks), link).ok())
      *link = {};  // unusable: the gate stays dense and says so
    return {};
  } catch (const std::bad_alloc&) {
    why->format("out of memory while probing the link");
    return StatusCode::out_of_memory;
  }
}

uint64_t fnv1a64(const void* data, size_t size, uint64_t hash) noexcept {
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < size; ++i) hash = (hash ^ bytes[i]) * 0x100000001b3ull;
  return hash;
}

}  // namespace gradgate
