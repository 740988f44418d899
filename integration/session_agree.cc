// Things all ranks must find out together: whether they were configured alike, and how fast the link between them is.
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <vector>

#include "gate/fit.h"
#include "gradgate/nccl.h"
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

Status agree_on_profile(Communicator& comm, const LinkProfile& profile, double timeout_s, bool* use, Message* ignored,
                        Message* why) noexcept {
  constexpr size_t kNumbers = 7;
  const double mine[kNumbers] = {static_cast<double>(profile.ranks),  profile.all_reduce.alpha_s,
                                 profile.all_reduce.beta_bytes_per_s, profile.all_gather.alpha_s,
                                 profile.all_gather.beta_bytes_per_s, profile.all_to_all.alpha_s,
                                 profile.all_to_all.beta_bytes_per_s};
  *use = false;
  try {
    const size_t ranks = static_cast<size_t>(comm.size());
    std::vector<double> all(kNumbers * ranks);
    if (const Status s = comm.all_gather(mine, all.data(), kNumbers, DType::f64, {}, Deadline::after(timeout_s));
        !s.ok()) {
      why->format("comparing the ranks' profiles: %s", comm.last_error());
      return s;
    }
    bool any = false;
    for (size_t r = 0; r < ranks; ++r) any = any || all[r * kNumbers] != 0;
    if (!any) return {};
    const auto ignore = [&](const char* text, size_t rank) {
      ignored->format("gradgate: the profile is ignored and the link is probed: rank %zu %s", rank, text);
    };
    for (size_t r = 1; r < ranks; ++r) {
      if (std::memcmp(all.data() + r * kNumbers, all.data(), sizeof mine) == 0) continue;
      return ignore("has another one than rank 0, or none", r), Status();
    }
    if (all[0] != static_cast<double>(ranks)) {
      ignored->format("gradgate: the profile is ignored and the link is probed: it is for %.0f ranks, here are %zu",
                      all[0], ranks);
      return {};
    }
    for (size_t i = 1; i < kNumbers; i += 2) {
      if (!(all[i] >= 0) || !std::isfinite(all[i])) return ignore("has an alpha that is not a time", 0), Status();
      if (!(all[i + 1] > 0) || !std::isfinite(all[i + 1]))
        return ignore("has a beta that is not a bandwidth", 0), Status();
    }
    *use = true;
    return {};
  } catch (const std::bad_alloc&) {
    why->format("out of memory while comparing the ranks' profiles");
    return StatusCode::out_of_memory;
  }
}

gate::LinkModel profile_model(const LinkProfile& profile) noexcept {
  using gate::ProbeCollective;
  const auto line = [&](ProbeCollective collective, const LinkSpec& link) {
    return gate::ring_line(collective, {link.alpha_s, link.beta_bytes_per_s}, profile.ranks);
  };
  return {line(ProbeCollective::all_reduce, profile.all_reduce), line(ProbeCollective::all_gather, profile.all_gather),
          line(ProbeCollective::all_to_all, profile.all_to_all), profile.ranks};
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

Status probe_nodes(Communicator& control, const NodeTiers& tiers, const Place& place, double timeout_s,
                   gate::LinkModel* link, Message* why) noexcept {
  const auto probe = [&](Communicator& tier, gate::LinkModel* model) -> Status {
    if (!place.on_device()) return probe_link(tier, timeout_s, model, why);
    std::unique_ptr<Communicator> numbers;
    GRADGATE_TRY(make_staged(tier, place.stream(), &numbers, why));
    return probe_device_link(tier, *numbers, place, timeout_s, model, why);
  };
  gate::LinkModel inside, between;
  GRADGATE_TRY(probe(*tiers.node, &inside));
  GRADGATE_TRY(probe(*tiers.between, &between));
  // One rank in a node, or one node: nothing travels there.
  if (tiers.node->size() == 1) inside = gate::link_model({0, 1}, 1);
  if (tiers.between->size() == 1) between = gate::link_model({0, 1}, 1);
  double numbers[] = {inside.all_gather.fixed_s,     inside.all_gather.per_byte_s, between.all_reduce.fixed_s,
                      between.all_reduce.per_byte_s, between.all_gather.fixed_s,   between.all_gather.per_byte_s,
                      between.all_to_all.fixed_s,    between.all_to_all.per_byte_s};
  if (const Status s = control.broadcast(numbers, std::size(numbers), DType::f64, 0, {}, Deadline::after(timeout_s));
      !s.ok()) {
    why->format("probing the nodes: %s", control.last_error());
    return s;
  }
  const auto line = [&](size_t i) { return gate::LinearCost{numbers[2 * i], numbers[2 * i + 1]}; };
  // A probe that did not fit leaves NaN, and hierarchical without a price.
  link->node = {line(0), line(1), line(2), line(3), static_cast<uint32_t>(tiers.node->size())};
  return {};
}

uint64_t fnv1a64(const void* data, size_t size, uint64_t hash) noexcept {
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < size; ++i) hash = (hash ^ bytes[i]) * 0x100000001b3ull;
  return hash;
}

}  // namespace gradgate
