#include "integration/cli/plan/page.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>

#include "gradgate/version.h"
#include "integration/cli/quantity.h"
#include "integration/cli/report.h"

namespace gradgate::cli {

extern const unsigned char kPlanTemplate[];
extern const std::size_t kPlanTemplateBytes;
namespace {

constexpr size_t kCurvePoints = 61, kMapColumns = 13;

// Four significant digits are more than a screen shows.
Json short_number(double value) {
  if (!std::isfinite(value)) return nullptr;
  char text[32];
  std::snprintf(text, sizeof(text), "%.4g", value);
  return Json::parse(text);
}

Json curves(const Planner& planner, uint32_t ranks, const std::vector<double>& sizes, double low, double high) {
  const size_t candidates = planner.candidates().size();
  Json dense = Json::array(), total = Json::array(), budget = Json::array(), codec = Json::array(),
       points = Json::array();
  for (size_t i = 0; i < candidates; ++i) {
    for (Json* list : {&total, &budget, &codec}) list->push_back(Json::array());
  }
  for (const double bytes : sizes) {
    const PlanCell cell = planner.cell(ranks, bytes);
    dense.push_back(short_number(cell.dense.seconds));
    for (size_t i = 0; i < candidates; ++i) {
      const PlanCost& cost = cell.costs[i];
      total[i].push_back(cost.offered() ? short_number(cost.total_s()) : Json(nullptr));
      budget[i].push_back(cost.offered() ? short_number(gate::codec_budget(cell.dense.seconds, cost.transfer_s))
                                         : Json(nullptr));
      codec[i].push_back(cost.offered() ? short_number(cost.codec_s()) : Json(nullptr));
    }
  }
  for (const Crossover& point : planner.crossovers(ranks, low, high)) {
    points.push_back({{"c", point.candidate},
                      {"m", point.bytes},
                      {"t", short_number(planner.dense(ranks, point.bytes).seconds)},
                      {"above", point.pays_above}});
  }
  return {{"ranks", ranks},   {"dense", dense}, {"total", total},
          {"budget", budget}, {"codec", codec}, {"points", points}};
}

Json page_data(const Planner& planner, const std::vector<uint32_t>& ranks, double low, double high) {
  const std::vector<double> sizes = log_spaced(low, high, kCurvePoints), columns = log_spaced(low, high, kMapColumns);
  Json names = Json::array(), series = Json::array(), map = Json::array(), notes = Json::array();
  for (const PlanCandidate& candidate : planner.candidates()) names.push_back(candidate.name);
  for (const uint32_t n : ranks) {
    series.push_back(curves(planner, n, sizes, low, high));
    Json row = Json::array();
    for (const double bytes : columns) {
      const PlanCell cell = planner.cell(n, bytes);
      row.push_back({cell.decision.chosen, short_number(cell.dense.seconds / cell.best_s())});
    }
    map.push_back(row);
  }
  const std::string assumptions = plan_assumptions(planner);
  for (size_t begin = 0; begin <= assumptions.size();) {
    const size_t end = std::min(assumptions.find('\n', begin), assumptions.size());
    notes.push_back(assumptions.substr(begin, end - begin));
    begin = end + 1;
  }
  return {{"version", GRADGATE_VERSION}, {"candidates", names}, {"notes", notes}, {"sizes", sizes},
          {"columns", columns},          {"series", series},    {"map", map}};
}

}  // namespace

std::string plan_page(const Planner& planner, const std::vector<uint32_t>& ranks, double low, double high) {
  std::string data = page_data(planner, ranks, low, high).dump(-1, ' ', true, Json::error_handler_t::replace);
  // Inside a script element nothing may look like the end of one.
  for (size_t at = data.find('<'); at != std::string::npos; at = data.find('<', at)) data.replace(at, 1, "\\u003c");
  constexpr std::string_view kPlace = "/*DATA*/null";
  std::string page(reinterpret_cast<const char*>(kPlanTemplate), kPlanTemplateBytes);
  const size_t place = page.find(kPlace);
  if (place == std::string::npos) throw std::logic_error("plan/page.html has no place for its data");
  return page.replace(place, kPlace.size(), data);
}

}  // namespace gradgate::cli
