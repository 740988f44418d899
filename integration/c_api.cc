// The C ABI: thin wrappers that turn handles, codes and texts into the C++ interface. Nothing is decided here.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <string_view>
#include <vector>

#include "gradgate/gradgate.h"
#include "gradgate/gradgate_c.h"
#include "integration/c_api_types.h"
#include "integration/comm/callback_comm.h"

using gradgate::Candidate;
using gradgate::Communicator;
using gradgate::DType;
using gradgate::Message;
using gradgate::Status;
using gradgate::StatusCode;
using gradgate::c_api::code;
using gradgate::c_api::report;

struct gg_thread_group {
  std::unique_ptr<gradgate::ThreadGroup> group;
  std::vector<gg_comm> ranks;
};
struct gg_session {
  std::unique_ptr<gradgate::Session> session;
};
struct gg_exchange {
  gradgate::ExchangeShape shape;
  std::vector<std::byte> workspace;
  gradgate::ExchangeMachine machine;
};

namespace {

bool valid_dtype(int dtype) { return dtype >= 0 && dtype <= static_cast<int>(DType::u8); }

Status parse_codecs(std::string_view text, std::vector<Candidate>* candidates, Message* why) {
  while (!text.empty()) {
    const size_t comma = text.find(',');
    Candidate candidate;
    GRADGATE_TRY(gradgate::parse_candidate(text.substr(0, comma), &candidate, why));
    candidates->push_back(candidate);
    text = comma == std::string_view::npos ? std::string_view{} : text.substr(comma + 1);
  }
  return {};
}

}  // namespace

extern "C" {

const char* gg_version(void) { return GRADGATE_VERSION; }
const char* gg_status_message(int status) { return Status(static_cast<StatusCode>(status)).message(); }

int gg_thread_group_create(int ranks, gg_thread_group** out) {
  if (out == nullptr) return code(StatusCode::invalid_argument);
  *out = nullptr;
  auto holder = std::unique_ptr<gg_thread_group>(new (std::nothrow) gg_thread_group);
  if (!holder) return code(StatusCode::out_of_memory);
  if (const Status s = gradgate::ThreadGroup::create(ranks, &holder->group); !s.ok()) return code(s);
  holder->ranks.resize(static_cast<size_t>(ranks));
  for (int r = 0; r < ranks; ++r) holder->ranks[static_cast<size_t>(r)].comm = &holder->group->rank(r);
  *out = holder.release();
  return 0;
}
void gg_thread_group_destroy(gg_thread_group* group) { delete group; }

gg_comm* gg_thread_group_rank(gg_thread_group* group, int rank) {
  if (group == nullptr || rank < 0 || static_cast<size_t>(rank) >= group->ranks.size()) return nullptr;
  return &group->ranks[static_cast<size_t>(rank)];
}

int gg_comm_create_shaped(gg_comm* inner, double alpha_s, double beta_bytes_per_s, int virtual_clock, gg_comm** out) {
  if (inner == nullptr || out == nullptr) return code(StatusCode::invalid_argument);
  *out = nullptr;
  auto holder = std::unique_ptr<gg_comm>(new (std::nothrow) gg_comm);
  if (!holder) return code(StatusCode::out_of_memory);
  const auto clock = virtual_clock != 0 ? gradgate::ClockKind::virtual_time : gradgate::ClockKind::real;
  if (const Status s = gradgate::make_shaped(*inner->comm, {alpha_s, beta_bytes_per_s}, clock, &holder->owned); !s.ok())
    return code(s);
  holder->comm = holder->owned.get();
  *out = holder.release();
  return 0;
}
int gg_comm_create_callbacks(int rank, int ranks, const gg_communicator_ops* ops, void* context,
                             const char* description, gg_comm** out, char* why, size_t why_bytes) {
  Message message;
  if (out != nullptr) *out = nullptr;
  if (ops == nullptr || out == nullptr) {
    message.format("gg_comm_create_callbacks: ops and out are needed");
    return report(StatusCode::invalid_argument, message, why, why_bytes);
  }
  auto holder = std::unique_ptr<gg_comm>(new (std::nothrow) gg_comm);
  if (!holder) return report(StatusCode::out_of_memory, message, why, why_bytes);
  if (const Status s =
          gradgate::comm::make_callback_comm(rank, ranks, *ops, context, description, &holder->owned, &message);
      !s.ok())
    return report(s, message, why, why_bytes);
  holder->comm = holder->owned.get();
  *out = holder.release();
  return 0;
}
int gg_nccl_make_id(void* id, char* why, size_t why_bytes) {
  Message message;
  if (id == nullptr) {
    message.format("gg_nccl_make_id: id is null");
    return report(StatusCode::invalid_argument, message, why, why_bytes);
  }
  static_assert(sizeof(gradgate::NcclId) == GG_NCCL_ID_BYTES);
  return report(gradgate::make_nccl_id(static_cast<gradgate::NcclId*>(id), &message), message, why, why_bytes);
}
int gg_comm_create_nccl(const void* id, int rank, int ranks, double timeout_s, gg_comm** out, char* why,
                        size_t why_bytes) {
  Message message;
  if (out != nullptr) *out = nullptr;
  if (id == nullptr || out == nullptr) {
    message.format("gg_comm_create_nccl: id and out are needed");
    return report(StatusCode::invalid_argument, message, why, why_bytes);
  }
  auto holder = std::unique_ptr<gg_comm>(new (std::nothrow) gg_comm);
  if (!holder) return report(StatusCode::out_of_memory, message, why, why_bytes);
  gradgate::NcclId copy;
  std::memcpy(&copy, id, sizeof copy);
  if (const Status s = gradgate::make_nccl(copy, rank, ranks, timeout_s, &holder->owned, &message); !s.ok())
    return report(s, message, why, why_bytes);
  holder->comm = holder->owned.get();
  *out = holder.release();
  return 0;
}
int gg_comm_wrap_nccl(void* nccl_comm, gg_comm** out, char* why, size_t why_bytes) {
  Message message;
  if (out == nullptr) return report(StatusCode::invalid_argument, message, why, why_bytes);
  *out = nullptr;
  auto holder = std::unique_ptr<gg_comm>(new (std::nothrow) gg_comm);
  if (!holder) return report(StatusCode::out_of_memory, message, why, why_bytes);
  if (const Status s = gradgate::wrap_nccl(nccl_comm, &holder->owned, &message); !s.ok())
    return report(s, message, why, why_bytes);
  holder->comm = holder->owned.get();
  *out = holder.release();
  return 0;
}
void gg_comm_destroy(gg_comm* comm) {
  if (comm != nullptr && comm->owned) delete comm;  // a rank of a thread group belongs to its group
}

void gg_session_options_init(gg_session_options* options) {
  if (options == nullptr) return;
  *options = {};
  options->size = sizeof(*options);
  options->mode = GG_AUTO;
  options->codecs = "bf16,int8";
  options->timeout_s = 30;
  options->error_budget = 0.1;
}

int gg_session_create(gg_comm* comm, const gg_session_options* options, gg_session** out, char* why, size_t why_bytes) {
  Message message;
  if (out != nullptr) *out = nullptr;
  if (comm == nullptr || options == nullptr || out == nullptr || options->size != sizeof(*options) ||
      options->mode < GG_AUTO || options->mode > GG_OBSERVE) {
    message.format("gg_session_create: comm, options (from gg_session_options_init) and out are needed, mode is 0 … 3");
    return report(StatusCode::invalid_argument, message, why, why_bytes);
  }
  try {
    std::vector<Candidate> candidates;
    if (const Status s = parse_codecs(options->codecs != nullptr ? options->codecs : "", &candidates, &message);
        !s.ok())
      return report(s, message, why, why_bytes);
    gradgate::SessionOptions o;
    o.mode = static_cast<gradgate::Mode>(options->mode);
    o.candidates = candidates;
    o.seed = options->seed;
    o.timeout_s = options->timeout_s;
    o.link = {options->link_alpha_s, options->link_beta_bytes_per_s};
    o.log = options->log;
    o.log_context = options->log_context;
    o.explain = options->explain;
    o.explain_context = options->explain_context;
    o.error_budget = options->error_budget;
    const gg_link_profile& p = options->profile;
    o.profile = {p.ranks,
                 {p.all_reduce_alpha_s, p.all_reduce_beta_bytes_per_s},
                 {p.all_gather_alpha_s, p.all_gather_beta_bytes_per_s},
                 {p.all_to_all_alpha_s, p.all_to_all_beta_bytes_per_s}};
    o.ranks_per_node = options->ranks_per_node;
    o.node_link = {options->node_link_alpha_s, options->node_link_beta_bytes_per_s};
    auto holder = std::make_unique<gg_session>();
    if (const Status s = gradgate::Session::create(*comm->comm, o, &holder->session, &message); !s.ok())
      return report(s, message, why, why_bytes);
    *out = holder.release();
    return 0;
  } catch (const std::bad_alloc&) {
    return report(StatusCode::out_of_memory, message, why, why_bytes);
  }
}
void gg_session_destroy(gg_session* session) { delete session; }

int gg_session_set_layout(gg_session* session, const gg_bucket* buckets, size_t count) {
  if (session == nullptr || (buckets == nullptr && count > 0)) return code(StatusCode::invalid_argument);
  try {
    std::vector<std::vector<gradgate::ParamSlice>> slices(count);
    std::vector<gradgate::BucketLayout> layout(count);
    for (size_t b = 0; b < count; ++b) {
      if (!valid_dtype(buckets[b].dtype) || (buckets[b].slices == nullptr && buckets[b].slice_count > 0))
        return code(StatusCode::invalid_argument);
      for (size_t i = 0; i < buckets[b].slice_count; ++i) {
        const gg_param_slice& s = buckets[b].slices[i];
        slices[b].push_back({s.param_id, s.offset, s.count});
      }
      layout[b] = {static_cast<DType>(buckets[b].dtype), slices[b]};
    }
    return code(session->session->set_layout(layout));
  } catch (const std::bad_alloc&) {
    return code(StatusCode::out_of_memory);
  }
}

int gg_session_all_reduce(gg_session* session, uint32_t bucket, void* data, size_t count, int dtype) {
  if (session == nullptr || !valid_dtype(dtype)) return code(StatusCode::invalid_argument);
  return code(session->session->all_reduce(bucket, {data, count, static_cast<DType>(dtype)}));
}
int gg_session_all_reduce_overlapped(gg_session* session, uint32_t bucket, void* data, size_t count, int dtype) {
  if (session == nullptr || !valid_dtype(dtype)) return code(StatusCode::invalid_argument);
  return code(session->session->all_reduce_overlapped(bucket, {data, count, static_cast<DType>(dtype)}));
}
int gg_session_finish(gg_session* session) {
  return session == nullptr ? code(StatusCode::invalid_argument) : code(session->session->finish());
}
int gg_session_unfinished(const gg_session* session) {
  return session != nullptr && session->session->unfinished() ? 1 : 0;
}
int gg_session_all_reduce_on(gg_session* session, uint32_t bucket, void* data, size_t count, int dtype, void* stream) {
  if (session == nullptr || !valid_dtype(dtype)) return code(StatusCode::invalid_argument);
  return code(session->session->all_reduce(bucket, {data, count, static_cast<DType>(dtype)}, {stream}));
}
int gg_session_all_reduce_dense_on(gg_session* session, void* data, size_t count, int dtype, void* stream) {
  if (session == nullptr || !valid_dtype(dtype)) return code(StatusCode::invalid_argument);
  return code(session->session->all_reduce_dense({data, count, static_cast<DType>(dtype)}, {stream}));
}
int gg_session_join(gg_session* session, void* stream) {
  return session == nullptr ? code(StatusCode::invalid_argument) : code(session->session->join({stream}));
}
int gg_session_synchronize(gg_session* session) {
  return session == nullptr ? code(StatusCode::invalid_argument) : code(session->session->synchronize());
}
void gg_session_bucket_ready(gg_session* session, uint32_t bucket, double ready_s) {
  if (session != nullptr) session->session->bucket_ready(bucket, ready_s);
}
double gg_now(void) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
int gg_session_all_reduce_dense(gg_session* session, void* data, size_t count, int dtype) {
  if (session == nullptr || !valid_dtype(dtype)) return code(StatusCode::invalid_argument);
  return code(session->session->all_reduce_dense({data, count, static_cast<DType>(dtype)}));
}
int gg_session_set_gradient_scale(gg_session* session, double scale) {
  return session == nullptr ? code(StatusCode::invalid_argument) : code(session->session->set_gradient_scale(scale));
}
int gg_session_skip_step(gg_session* session) {
  return session == nullptr ? code(StatusCode::invalid_argument) : code(session->session->skip_step());
}
void gg_session_set_dense_division(gg_session* session, int divide) {
  if (session != nullptr) session->session->set_dense_division(divide != 0);
}
const float* gg_session_residual(const gg_session* session, uint32_t bucket) {
  return session == nullptr ? nullptr : session->session->residual(bucket);
}
int gg_session_read_residual(const gg_session* session, uint32_t bucket, float* to) {
  return session == nullptr ? code(StatusCode::invalid_argument) : code(session->session->read_residual(bucket, to));
}
int gg_session_flush(gg_session* session) {
  return session == nullptr ? code(StatusCode::invalid_argument) : code(session->session->flush());
}
void gg_session_get_stats(const gg_session* session, gg_session_stats* out) {
  if (session == nullptr || out == nullptr) return;
  const gradgate::SessionStats s = session->session->stats();
  *out = {s.steps,
          s.dense_buckets,
          s.compressed_buckets,
          s.dense_bytes,
          s.wire_bytes,
          s.non_finite,
          s.dropped_residuals,
          s.dropped_sum,
          s.encode_s,
          s.transfer_s,
          s.decode_s,
          s.gate_s,
          s.saved_s,
          s.skipped_steps,
          s.failed_exchanges,
          s.demotions,
          s.compression_error,
          s.residual_ratio};
}
const char* gg_session_explain(const gg_session* session, uint32_t bucket) {
  return session == nullptr ? "" : session->session->explain(bucket);
}
const char* gg_session_phase(const gg_session* session) { return session == nullptr ? "" : session->session->phase(); }
size_t gg_session_state_bytes(const gg_session* session) {
  return session == nullptr ? 0 : session->session->state_bytes();
}
int gg_session_save_state(const gg_session* session, void* out, size_t bytes, size_t* written) {
  if (session == nullptr || (out == nullptr && bytes > 0)) return code(StatusCode::invalid_argument);
  return code(session->session->save_state({static_cast<std::byte*>(out), bytes}, written));
}
int gg_session_load_state(gg_session* session, const void* state, size_t bytes) {
  if (session == nullptr || (state == nullptr && bytes > 0)) return code(StatusCode::invalid_argument);
  return code(session->session->load_state({static_cast<const std::byte*>(state), bytes}));
}
const char* gg_session_last_error(const gg_session* session) {
  return session == nullptr ? "no session" : session->session->last_error();
}

int gg_exchange_create(const char* codec, size_t count, int dtype, int rank, int ranks, gg_exchange** out, char* why,
                       size_t why_bytes) {
  Message message;
  if (out != nullptr) *out = nullptr;
  if (codec == nullptr || out == nullptr || !valid_dtype(dtype) || ranks < 1 || rank < 0 || rank >= ranks) {
    message.format(
        "gg_exchange_create: needs a codec, a dtype 0 … 4, and 0 <= rank < ranks (got dtype %d, rank %d of %d)", dtype,
        rank, ranks);
    return report(StatusCode::invalid_argument, message, why, why_bytes);
  }
  Candidate candidate;
  if (const Status s = gradgate::parse_candidate(codec, &candidate, &message); !s.ok())
    return report(s, message, why, why_bytes);
  if (!gradgate::codec_takes(candidate.codec, static_cast<DType>(dtype))) {
    message.format("gg_exchange_create: codec %s does not take %s gradients", codec,
                   gradgate::dtype_name(static_cast<DType>(dtype)));
    return report(StatusCode::unsupported, message, why, why_bytes);
  }
  try {
    auto holder = std::make_unique<gg_exchange>();
    holder->shape = {candidate, count, static_cast<DType>(dtype), rank, ranks, 1};
    holder->workspace.resize(gradgate::exchange_workspace_bytes(holder->shape));
    *out = holder.release();
    return 0;
  } catch (const std::bad_alloc&) {
    return report(StatusCode::out_of_memory, message, why, why_bytes);
  }
}
void gg_exchange_destroy(gg_exchange* exchange) { delete exchange; }

int gg_exchange_begin(gg_exchange* exchange, void* gradient, float* residual, int feedback, uint64_t key,
                      uint32_t tensor, uint32_t step) {
  if (exchange == nullptr || feedback < GG_FEEDBACK_NONE || feedback > GG_FEEDBACK_FLUSH)
    return code(StatusCode::invalid_argument);
  gradgate::ExchangeArgs args;
  args.shape = exchange->shape;
  args.gradient = {gradient, exchange->shape.count, exchange->shape.dtype};
  args.residual = residual;
  args.feedback = static_cast<gradgate::Feedback>(feedback);
  args.workspace = exchange->workspace;
  args.seed = {key, tensor, step, 0};
  return code(exchange->machine.begin(args));
}
int gg_exchange_next(gg_exchange* exchange, gg_call* call) {
  if (exchange == nullptr || call == nullptr) return code(StatusCode::invalid_argument);
  gradgate::CollectiveCall c;
  const Status s = exchange->machine.next(&c);
  *call = {static_cast<int>(c.kind), c.send, c.recv, c.count, static_cast<int>(c.dtype)};
  return code(s);
}
const char* gg_exchange_last_error(const gg_exchange* exchange) {
  return exchange == nullptr ? "no exchange" : exchange->machine.last_error();
}

}  // extern "C"
