/* C interface of gradgate: sessions over thread ranks, and the exchange state machine for any other transport.
 *
 * Every fallible function returns a status code (0 = ok, values of gradgate/status.h) and throws nothing. Objects are
 * used by one thread at a time; strings returned by a function live until the next call on the same object. Sizes are
 * elements unless named bytes. */
#ifndef GRADGATE_C_H_
#define GRADGATE_C_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GG_API __attribute__((visibility("default")))

enum { GG_F32 = 0, GG_BF16 = 1, GG_F16 = 2, GG_F64 = 3, GG_U8 = 4 };
enum { GG_AUTO = 0, GG_ON = 1, GG_OFF = 2, GG_OBSERVE = 3 };
enum { GG_FEEDBACK_NONE = 0, GG_FEEDBACK_APPLY = 1, GG_FEEDBACK_FLUSH = 2 };
enum {
  GG_DONE = 0,
  GG_ALL_REDUCE = 1,
  GG_ALL_GATHER = 2,
  GG_ALL_TO_ALL = 3,
  GG_REDUCE_SCATTER = 4,
  GG_BROADCAST = 5,
  GG_BARRIER = 6
};

GG_API const char* gg_version(void);
GG_API const char* gg_status_message(int status);

/* --- communicators
 * ------------------------------------------------------------------------------------------------------------ */
typedef struct gg_thread_group gg_thread_group; /* ranks as threads of this process */
typedef struct gg_comm gg_comm;                 /* one rank */

GG_API int gg_thread_group_create(int ranks, gg_thread_group** out);
GG_API void gg_thread_group_destroy(gg_thread_group* group);
/* One rank's communicator, owned by the group, for one thread. Null outside 0 … ranks-1. */
GG_API gg_comm* gg_thread_group_rank(gg_thread_group* group, int rank);
/* Paces `inner` to a link of `alpha_s` seconds and `beta_bytes_per_s` (emulated). The result is destroyed by
 * gg_comm_destroy, before `inner`. */
GG_API int gg_comm_create_shaped(gg_comm* inner, double alpha_s, double beta_bytes_per_s, int virtual_clock,
                                 gg_comm** out);
GG_API void gg_comm_destroy(gg_comm* comm);

/* A transport of your own: blocking collectives on host memory. Every function returns a status code, 0 when this
 * rank's result is there; `timeout_s` is what is left for waiting. Counts, blocks and aliasing are those of
 * gradgate/communicator.h (all_reduce: send == recv; all_gather: send may be the own block of recv). Calls come from
 * the thread that calls the session, in the same order on every rank. After a failure none comes any more. */
typedef struct gg_communicator_ops {
  size_t size; /* sizeof(gg_communicator_ops): lets the struct grow */
  int (*all_reduce_sum)(void* context, const void* send, void* recv, size_t count, int dtype, double timeout_s);
  int (*all_gather)(void* context, const void* send, void* recv, size_t count, int dtype, double timeout_s);
  int (*all_to_all)(void* context, const void* send, void* recv, size_t count, int dtype, double timeout_s);
  int (*reduce_scatter_sum)(void* context, const void* send, void* recv, size_t count, int dtype,
                            double timeout_s); /* may be null */
  int (*broadcast)(void* context, void* data, size_t count, int dtype, int root, double timeout_s);
  int (*barrier)(void* context, double timeout_s);
  void (*abort)(void* context);             /* any thread; may be null */
  const char* (*last_error)(void* context); /* why the last call failed; may be null */
  /* Both or none: an all_gather that returns when it is under way, and the wait for the oldest one started. */
  int (*start_all_gather)(void* context, const void* send, void* recv, size_t count, int dtype, double timeout_s);
  int (*finish_all_gather)(void* context, double timeout_s);
} gg_communicator_ops;

/* `ops` and `description` are copied, `context` must live as long as the communicator (gg_comm_destroy). */
GG_API int gg_comm_create_callbacks(int rank, int ranks, const gg_communicator_ops* ops, void* context,
                                    const char* description, gg_comm** out, char* why, size_t why_bytes);

/* Ranks over NCCL, each on the CUDA device that is current where it is made (gradgate/nccl.h): collective; one rank
 * makes the id, GG_NCCL_ID_BYTES bytes, and hands it to all others. gg_comm_wrap_nccl borrows an ncclComm_t. Sessions
 * over them take device memory (gg_session_all_reduce_on). On failure `why` (may be null) receives a text. */
#define GG_NCCL_ID_BYTES 128
GG_API int gg_nccl_make_id(void* id, char* why, size_t why_bytes);
GG_API int gg_comm_create_nccl(const void* id, int rank, int ranks, double timeout_s, gg_comm** out, char* why,
                               size_t why_bytes);
GG_API int gg_comm_wrap_nccl(void* nccl_comm, gg_comm** out, char* why, size_t why_bytes);

/* --- session
 * ------------------------------------------------------------------------------------------------------------------ */
typedef struct gg_session gg_session;

/* A measured link as `gradgate calibrate` writes it: seconds and bytes per second of each collective's ring formula at
 * `ranks` ranks (docs/program.md, calibration profiles). ranks 0: none. */
typedef struct gg_link_profile {
  uint32_t ranks;
  double all_reduce_alpha_s, all_reduce_beta_bytes_per_s;
  double all_gather_alpha_s, all_gather_beta_bytes_per_s;
  double all_to_all_alpha_s, all_to_all_beta_bytes_per_s;
} gg_link_profile;

typedef struct gg_session_options {
  size_t size;        /* sizeof(gg_session_options), set by gg_session_options_init: lets the struct grow */
  int mode;           /* GG_AUTO … */
  const char* codecs; /* comma-separated codec[@exchange], e.g. "bf16,int8"; copied */
  uint64_t seed;
  double timeout_s;    /* of every wait for a peer */
  double link_alpha_s; /* a known link; both 0: the link is probed */
  double link_beta_bytes_per_s;
  void (*log)(void* context, const char* line, size_t length); /* decision log, JSONL; may be null */
  void* log_context;
  void (*explain)(void* context, const char* line); /* one-line explanations, rank 0 only; may be null */
  void* explain_context;
  double error_budget;      /* relative error at which the guard demotes a codec without feedback */
  gg_link_profile profile;  /* spares the probe where every rank has the same, for this number of ranks; else it is
                               ignored, which explain says in one line */
  int ranks_per_node;       /* 0, or consecutive ranks that share a node: codecs may then be "codec@hierarchical" */
  double node_link_alpha_s; /* a known link inside a node, beside link; both 0: that of link, or probed */
  double node_link_beta_bytes_per_s;
} gg_session_options;

typedef struct gg_param_slice {
  uint64_t param_id;
  size_t offset, count;
} gg_param_slice;
typedef struct gg_bucket {
  int dtype;
  const gg_param_slice* slices;
  size_t slice_count;
} gg_bucket;

typedef struct gg_session_stats {
  uint64_t steps, dense_buckets, compressed_buckets, dense_bytes, wire_bytes, non_finite, dropped_residuals;
  double dropped_sum, encode_s, transfer_s, decode_s, gate_s, saved_s;
  uint64_t skipped_steps, failed_exchanges, demotions;
  double compression_error, residual_ratio;
} gg_session_stats;

GG_API void gg_session_options_init(gg_session_options* options); /* auto, "bf16,int8", 30 s, 0.1 */
/* Collective. On failure `why` (may be null) receives at most why_bytes of text and *out is null. */
GG_API int gg_session_create(gg_comm* comm, const gg_session_options* options, gg_session** out, char* why,
                             size_t why_bytes);
GG_API void gg_session_destroy(gg_session* session);
GG_API int gg_session_set_layout(gg_session* session, const gg_bucket* buckets, size_t count);
/* Averages data over the ranks, in place. */
GG_API int gg_session_all_reduce(gg_session* session, uint32_t bucket, void* data, size_t count, int dtype);
/* The same, but the bucket may still be on the wire when it returns: gg_session_unfinished is then 1, data must stay, and
 * the average is there when gg_session_finish or the next bucket's call has returned, whose status is then of both. */
GG_API int gg_session_all_reduce_overlapped(gg_session* session, uint32_t bucket, void* data, size_t count, int dtype);
GG_API int gg_session_finish(gg_session* session);
GG_API int gg_session_unfinished(const gg_session* session);
/* The same for data in device memory, over NCCL ranks: enqueued behind `stream` (a cudaStream_t) on the session's own
 * stream, and returns. data must stay until gg_session_join or gg_session_synchronize; a step's error is returned with
 * the next step's first bucket, or by gg_session_synchronize. */
GG_API int gg_session_all_reduce_on(gg_session* session, uint32_t bucket, void* data, size_t count, int dtype,
                                    void* stream);
GG_API int gg_session_all_reduce_dense_on(gg_session* session, void* data, size_t count, int dtype, void* stream);
/* What is enqueued on `stream` from now on comes after all reductions so far. */
GG_API int gg_session_join(gg_session* session, void* stream);
/* Waits for all reductions so far. Collective where an agreement is due; before gg_session_save_state. */
GG_API int gg_session_synchronize(gg_session* session);
/* When the trainer had this bucket's gradient: seconds on the clock of gg_now(). Before gg_session_all_reduce(); once
 * all buckets have one the gate prices exposed time. */
GG_API void gg_session_bucket_ready(gg_session* session, uint32_t bucket, double ready_s);
GG_API double gg_now(void);
/* Dense average of a bucket that the layout does not know; such a step ends with gg_session_set_layout(). */
GG_API int gg_session_all_reduce_dense(gg_session* session, void* data, size_t count, int dtype);
/* The loss scale of the next steps' gradients; a step with a non-finite result then counts as skipped (session.h). */
GG_API int gg_session_set_gradient_scale(gg_session* session, double scale);
/* The step that runs will be skipped by the trainer for a reason that the session cannot see. */
GG_API int gg_session_skip_step(gg_session* session);
/* Dense buckets divide by the ranks instead of multiplying by 1/ranks. */
GG_API void gg_session_set_dense_division(gg_session* session, int divide);
/* This rank's residual of a bucket, sum units, in the gradients' memory; null where there is none. Valid until the next
 * call. */
GG_API const float* gg_session_residual(const gg_session* session, uint32_t bucket);
/* Copies it to `to` in host memory: count floats of the bucket. */
GG_API int gg_session_read_residual(const gg_session* session, uint32_t bucket, float* to);
GG_API int gg_session_flush(gg_session* session);
GG_API void gg_session_get_stats(const gg_session* session, gg_session_stats* out);
GG_API const char* gg_session_explain(const gg_session* session, uint32_t bucket);
GG_API const char* gg_session_phase(const gg_session* session);
GG_API size_t gg_session_state_bytes(const gg_session* session);
GG_API int gg_session_save_state(const gg_session* session, void* out, size_t bytes, size_t* written);
GG_API int gg_session_load_state(gg_session* session, const void* state, size_t bytes);
GG_API const char* gg_session_last_error(const gg_session* session);

/* --- a gate around another reduction
 * ---------------------------------------------------------------------------------------------- */
typedef struct gg_hook_gate gg_hook_gate; /* compares somebody else's reduction of whole steps with dense */
enum { GG_STEP_DENSE = 0, GG_STEP_PROBE = 1, GG_STEP_FLUSH = 2, GG_STEP_HOOK = 3 };

typedef struct gg_hook_gate_options {
  size_t size;        /* sizeof(gg_hook_gate_options) */
  const char* name;   /* of the reduction; copied */
  double dense_bytes; /* of a step's gradients */
  double timeout_s;
  void (*log)(void* context, const char* line, size_t length); /* as in gg_session_options */
  void* log_context;
  void (*explain)(void* context, const char* line);
  void* explain_context;
} gg_hook_gate_options;
typedef struct gg_hook_gate_stats {
  uint64_t steps, hook_steps;
  double saved_s, dense_step_s, plan_step_s; /* NaN before they were measured */
} gg_hook_gate_stats;

/* Collective. */
GG_API int gg_hook_gate_create(gg_comm* comm, const gg_hook_gate_options* options, gg_hook_gate** out, char* why,
                               size_t why_bytes);
GG_API void gg_hook_gate_destroy(gg_hook_gate* gate);
/* GG_STEP_…: what the step that begins does, the same on every rank. Probe: dense, the reduction's residual stays as it
 * is. Flush: dense, and the residual goes with it. */
GG_API int gg_hook_gate_plan(const gg_hook_gate* gate);
/* The step's last bucket was complete at now_s, on the clock of gg_now(). Collective where an agreement is due. */
GG_API int gg_hook_gate_end_step(gg_hook_gate* gate, double now_s);
GG_API const char* gg_hook_gate_explain(gg_hook_gate* gate);
GG_API const char* gg_hook_gate_phase(const gg_hook_gate* gate);
GG_API void gg_hook_gate_get_stats(const gg_hook_gate* gate, gg_hook_gate_stats* out);
GG_API const char* gg_hook_gate_last_error(const gg_hook_gate* gate);

/* --- exchange: bring your own collectives
 * ---------------------------------------------------------------------------------------- */
typedef struct gg_exchange gg_exchange;

/* One collective to perform: kind is GG_DONE when the gradient holds the average. count is per rank's block (of the
 * vector for GG_ALL_REDUCE); dtype is the element type of send and recv. */
typedef struct gg_call {
  int kind;
  const void* send;
  void* recv;
  size_t count;
  int dtype;
} gg_call;

/* A machine for one bucket: codec[@exchange], e.g. "chunk-topk:8/1024@all_gather", elements, dtype of the gradient. It
 * owns its workspace. */
GG_API int gg_exchange_create(const char* codec, size_t count, int dtype, int rank, int ranks, gg_exchange** out,
                              char* why, size_t why_bytes);
GG_API void gg_exchange_destroy(gg_exchange* exchange);
/* Encodes. `residual`: count floats in sum units, or null with GG_FEEDBACK_NONE. */
GG_API int gg_exchange_begin(gg_exchange* exchange, void* gradient, float* residual, int feedback, uint64_t key,
                             uint32_t tensor, uint32_t step);
/* First call: the first collective. Later: consumes the one just performed. */
GG_API int gg_exchange_next(gg_exchange* exchange, gg_call* call);
GG_API const char* gg_exchange_last_error(const gg_exchange* exchange);

#ifdef __cplusplus
}
#endif
#endif /* GRADGATE_C_H_ */
