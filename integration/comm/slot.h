// Slots of the collectives: the place of one rank's payload.
#pragma once

#include "gradgate/exchange.h"

namespace gradgate::comm {

/// The payload for `count` elements at the beginning of a slot; what a shorter shard leaves of the slot is zero.
Bytes payload_in(const ExchangeShape& shape, size_t count, Bytes slot) noexcept;
void zero_rest(const ExchangeShape& shape, size_t count, Bytes slot) noexcept;
/// Fills a slot with an error payload.
void put_error(const ExchangeArgs& args, size_t count, StatusCode code, Bytes slot) noexcept;

}  // namespace gradgate::comm
