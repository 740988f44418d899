// From numbers to advice: what `gradgate doctor` says. Pure: nothing here measures or prints.
#pragma once

#include <string>
#include <vector>

#include "gate/predict.h"
#include "gradgate/exchange.h"

namespace gradgate::cli {

/// What one codec costs for one bucket on one rank, seconds.
struct CodecWork {
  Candidate candidate;
  std::string name;
  double encode_s = 0, decode_s = 0;         ///< medians
  double codec_low_s = 0, codec_high_s = 0;  ///< encode + decode: the quartiles of the rounds
  double transfer_s = 0;                     ///< by the link's model
  double wire_bytes = 0;                     ///< what stands for the bucket; 0: the codec does not take the dtype
  int fidelity = 0;
};

struct DoctorNumbers {
  double parameters = 0, gradient_bytes = 0;  ///< of the whole model, on each rank
  double bucket_bytes = 0;                    ///< of a full bucket; the last one is what is left
  double step_s = 0;                          ///< forward and backward without communication
  double backward_share = 0.67;               ///< of step_s, at its end; gradients become ready evenly over it
  int ranks = 2;
  double dense_s = 0;     ///< the dense exchange of a full bucket, by the link's model
  double link_error = 0;  ///< how far link times may be off, as a share of them
  std::vector<CodecWork> codecs;
};

struct Advice {
  gate::Decision decision;  ///< the inequality of a full bucket; chosen 0: leave it off
  int chosen = 0;           ///< after overlap and error were looked at; 0: off
  size_t buckets = 0;
  double step_dense_s = 0;   ///< a step with dense communication, overlapped
  double step_chosen_s = 0;  ///< with the chosen codec; of the best one that was turned down where chosen is 0
  double saving_s = 0;       ///< step_dense_s − step_chosen_s
  double saving_low_s = 0, saving_high_s = 0;  ///< with link and codec at the ends of their ranges
  double serial_saving_s = 0;                  ///< if nothing overlapped
  double inflation = 0;  ///< T_dense / T_compressed − 1 of steps: share of further steps that convergence may cost
  double residual_bytes = 0;  ///< on each rank
  std::string verdict;        ///< one line for people
  std::vector<std::string> reasons;
};

Advice advise(const DoctorNumbers& numbers);

}  // namespace gradgate::cli
