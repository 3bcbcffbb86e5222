// Counts the bytes that torch's CPU allocator has given out, on all threads. torch's profiler does not see what other
// threads free, and gloo's free the copies of every collective: in its sums they would stay for ever.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <mutex>
#include <unordered_map>

namespace {

std::mutex mutex;
std::unordered_map<void*, long long> sizes;
long long now = 0, most = 0;

void release(void* data) {
  {
    std::lock_guard<std::mutex> guard(mutex);
    auto found = sizes.find(data);
    if (found != sizes.end()) {  // not made before the last start()
      now -= found->second;
      sizes.erase(found);
    }
  }
  c10::free_cpu(data);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = c10::alloc_cpu(size);
    if (data != nullptr) {
      std::lock_guard<std::mutex> guard(mutex);
      sizes[data] = static_cast<long long>(size);
      now += static_cast<long long>(size);
      if (now > most) most = now;
    }
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};

CountingAllocator allocator;

}  // namespace

extern "C" {

// Counts from here on, beginning at 0.
void start() {
  c10::SetCPUAllocator(&allocator, 1);
  std::lock_guard<std::mutex> guard(mutex);
  sizes.clear();
  now = most = 0;
}

// Looks for the peak from here on.
void begin_peak() {
  std::lock_guard<std::mutex> guard(mutex);
  most = now;
}

long long peak() {
  std::lock_guard<std::mutex> guard(mutex);
  return most;
}
}
