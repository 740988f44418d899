// What a trainer author writes first: four thread ranks average r + 1.
#include <gradgate/gradgate.h>

#include <cstdio>
#include <thread>
#include <vector>

int main() {
  std::unique_ptr<gradgate::ThreadGroup> group;
  if (!gradgate::ThreadGroup::create(4, &group).ok()) return 1;
  std::vector<std::thread> threads;
  float averages[4] = {};
  for (int r = 0; r < 4; ++r) {
    threads.emplace_back([&, r] {
      std::unique_ptr<gradgate::Session> session;
      gradgate::SessionOptions options;
      options.mode = gradgate::Mode::off;
      const gradgate::ParamSlice slice{1, 0, 1};
      const gradgate::BucketLayout layout{gradgate::DType::f32, {&slice, 1}};
      float gradient = static_cast<float>(r + 1);
      if (gradgate::Session::create(group->rank(r), options, &session).ok() && session->set_layout({&layout, 1}).ok() &&
          session->all_reduce(0, {&gradient, 1, gradgate::DType::f32}).ok())
        averages[r] = gradient;
    });
  }
  for (auto& t : threads) t.join();
  std::printf("average %g %g %g %g\n", averages[0], averages[1], averages[2], averages[3]);
  return averages[0] == 2.5f && averages[3] == 2.5f ? 0 : 1;
}
