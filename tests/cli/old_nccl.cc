// A libnccl of a version that gradgate refuses.
extern "C" int ncclGetVersion(int* version);
extern "C" int ncclGetVersion(int* version) {
  *version = 21701;
  return 0;
}
