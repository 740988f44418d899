/* Two ranks as threads average a gradient through the gate, from C. */
#include <gradgate/gradgate_c.h>
#include <pthread.h>
#include <stdio.h>

enum { kRanks = 2, kCount = 100000, kSteps = 40 };
static gg_thread_group* group;
static float gradients[kRanks][kCount];

static void* rank_main(void* argument) {
  const int rank = *(int*)argument;
  char why[256];
  gg_session* session;
  gg_session_options options;
  gg_session_options_init(&options); /* mode auto, codecs bf16 and int8 */
  if (gg_session_create(gg_thread_group_rank(group, rank), &options, &session, why, sizeof why) != 0) return fputs(why, stderr), argument;

  const gg_param_slice weights = {.param_id = 7, .offset = 0, .count = kCount};
  const gg_bucket bucket = {.dtype = GG_F32, .slices = &weights, .slice_count = 1};
  int status = gg_session_set_layout(session, &bucket, 1);
  for (int step = 0; status == 0 && step < kSteps; ++step) {
    for (int i = 0; i < kCount; ++i) gradients[rank][i] = (float)(i % 1000 + rank); /* your backward pass */
    status = gg_session_all_reduce(session, 0, gradients[rank], kCount, GG_F32);    /* then your optimizer */
  }
  if (status != 0) fputs(gg_session_last_error(session), stderr);
  if (status == 0 && rank == 0) printf("gradient[999] = %g; %s\n", gradients[0][999], gg_session_explain(session, 0));
  gg_session_destroy(session);
  return status == 0 ? NULL : argument;
}

int main(void) {
  pthread_t threads[kRanks];
  int ranks[kRanks] = {0, 1};
  void* failed[kRanks];
  if (gg_thread_group_create(kRanks, &group) != 0) return 1;
  for (int r = 0; r < kRanks; ++r) pthread_create(&threads[r], NULL, rank_main, &ranks[r]);
  for (int r = 0; r < kRanks; ++r) pthread_join(threads[r], &failed[r]);
  gg_thread_group_destroy(group);
  return failed[0] != NULL || failed[1] != NULL;
}
