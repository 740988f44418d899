// The page of `gradgate plan -o plan.html`: one file, no requests, drawn by its own script from the numbers in it.
#pragma once

#include <string>
#include <vector>

#include "integration/cli/plan/break_even.h"

namespace gradgate::cli {

/// Time against message size per candidate with its crossovers, the best candidate over ranks and message size, and the
/// budgets, for messages from `low` to `high` bytes.
std::string plan_page(const Planner& planner, const std::vector<uint32_t>& ranks, double low, double high);

}  // namespace gradgate::cli
