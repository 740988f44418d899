// A communicator that hands everything on to another: what a test changes it overrides.
#pragma once

#include <memory>

#include "gradgate/communicator.h"

namespace gradgate::test {

class Forwarding : public Communicator {
 public:
  explicit Forwarding(Communicator& inner) : inner_(inner) {}
  int rank() const noexcept override { return inner_.rank(); }
  int size() const noexcept override { return inner_.size(); }
  bool supports(Collective op, DType dtype) const noexcept override { return inner_.supports(op, dtype); }
  const char* description() const noexcept override { return inner_.description(); }
  Status all_reduce_sum(const void* s, void* r, size_t n, DType t, Stream q, Deadline d) noexcept override {
    return inner_.all_reduce_sum(s, r, n, t, q, d);
  }
  Status all_gather(const void* s, void* r, size_t n, DType t, Stream q, Deadline d) noexcept override {
    return inner_.all_gather(s, r, n, t, q, d);
  }
  Status all_to_all(const void* s, void* r, size_t n, DType t, Stream q, Deadline d) noexcept override {
    return inner_.all_to_all(s, r, n, t, q, d);
  }
  Status reduce_scatter_sum(const void* s, void* r, size_t n, DType t, Stream q, Deadline d) noexcept override {
    return inner_.reduce_scatter_sum(s, r, n, t, q, d);
  }
  Status broadcast(void* p, size_t n, DType t, int root, Stream q, Deadline d) noexcept override {
    return inner_.broadcast(p, n, t, root, q, d);
  }
  Status barrier(Stream q, Deadline d) noexcept override { return inner_.barrier(q, d); }
  Status split(int c, int k, std::unique_ptr<Communicator>* out, Deadline d) noexcept override {
    return inner_.split(c, k, out, d);
  }
  void abort() noexcept override { inner_.abort(); }
  double now() const noexcept override { return inner_.now(); }
  void advance(double s) noexcept override { inner_.advance(s); }
  bool virtual_clock() const noexcept override { return inner_.virtual_clock(); }
  const char* last_error() const noexcept override { return inner_.last_error(); }

 protected:
  Communicator& inner_;
};

}  // namespace gradgate::test
