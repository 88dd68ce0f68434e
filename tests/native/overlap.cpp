// More workers in one workspace than its launch has, on threads: those too many are refused, the launch learns of it, its
// waits end, and whoever leaves last knows that it failed. prints one line of counts, or what went wrong (exit status 1)
//   overlap ROUNDS
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "scheduler.h"

using namespace weave;

namespace {

struct Seen {
  bool entered = false, waited = false;
  Departure departure = NOT_THE_LAST;
};

const char* overlap(Control& control, u32 workers, u32 more) {
  std::vector<u32> up_done(3), down_done(2);
  const Shared shared{&control, nullptr, up_done.data(), down_done.data(), {nullptr, nullptr}, workers, 3, 2, 1u << 30};
  std::vector<Seen> seen(workers + more);
  std::vector<std::thread> threads;
  std::atomic<u32> asked{0};
  for (Seen& s : seen)
    threads.emplace_back([&] {
      s.entered = enter(shared);
      ++asked;
      while (asked < workers + more) std::this_thread::yield();  // nobody leaves before everybody has asked
      if (!s.entered) return;
      s.waited = wait_for_plan(shared);  // which nobody makes
      s.departure = leave(shared, Serial());
    });
  for (std::thread& t : threads) t.join();
  u32 entered = 0, failed_last = 0;
  for (const Seen& s : seen) {
    entered += s.entered;
    if (s.waited) return "a wait ended as if there were a plan";
    if (s.departure == THE_LAST) return "the last worker takes the launch for one that succeeded";
    failed_last += s.departure == THE_LAST_OF_A_FAILED_LAUNCH;
  }
  if (entered != workers) return "not as many entered as the launch has workers";
  if (failed_last != 1) return "not one worker was the last of a failed launch";
  if (control.error != OVERLAP) return "the error is not OVERLAP";
  if (control.entered || control.left) return "the counts of workers were not reset";
  // It stays until the host clears it, whatever fails later.
  fail(&control, TASK_TIMEOUT);
  if (control.error != OVERLAP) return "a later error took the first one's place";
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  u64 launches = 0;
  for (int round = 0; round < std::atoi(argv[1]); ++round)
    for (u32 workers = 1; workers <= 5; ++workers)
      for (u32 more = 1; more <= 5; more += 2) {
        Control control{};
        if (const char* wrong = overlap(control, workers, more)) {
          std::printf("%u workers and %u more: %s\n", workers, more, wrong);
          return 1;
        }
        ++launches;
      }
  std::printf("overlaps %llu\n", launches);
  return 0;
}
