// Streams that run side by side as far as nothing makes one wait for another. Work is not timed: each piece of
// it knows by vector clocks (Fidge 1988; Mattern 1989) which work of other streams it comes after, so that an
// access to memory that another stream may be using at the time is found each time, not by chance.
//
// Copies from and to pinned memory are put off until a stream or the host has waited for them, and what they
// write holds NaN until then. Memory that is freed while another stream uses it, and what is read too early, is
// overwritten with NaN, so that results go wrong as they would on a device.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace streams {

using Id = int64_t;                    // of a stream; 0 is the one that work is on by default
using Clock = std::map<Id, uint64_t>;  // how much of each stream's work has been waited for
using Address = uintptr_t;

struct Access {
  Address low, high;
  Id stream;
  uint64_t at;
  bool writes;
  std::string by;
};

struct Block {  // memory of the device
  Address high;
  Id owner;  // the stream on which its memory is used again once it is freed
  std::set<Id> recorded;
  std::vector<Access> accesses;
  int64_t number = 0;  // of its allocation
};

struct Copy {
  Id stream;
  uint64_t at;
  std::function<void()> run;
};

inline thread_local Id current = 0;
inline thread_local bool unobserved = false;  // within an operator, or a library that the host does not wait for
inline std::recursive_mutex mutex;
inline std::map<Id, Clock> clocks;
inline Clock host;  // what the host has waited for: all threads, which wait for each other by other means
inline std::map<Address, Block> blocks;
inline std::vector<Copy> copies;      // put off, in the order of their calls
inline std::vector<void*> freed;      // which copies that are put off may still use
inline std::vector<Clock> events;
inline uint64_t deferred = 0;
inline std::vector<Copy> finished;    // their tensors are dropped once nothing is locked

// A thread that waits for the mutex may hold Python's interpreter lock (GIL), which the last owner of a Python
// tensor takes to free it: `finished` is emptied only after the mutex is unlocked.
class Lock {
 public:
  Lock() {
    mutex.lock();
    ++depth;
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  ~Lock() {
    std::vector<Copy> copies;
    if (--depth == 0) copies.swap(finished);
    mutex.unlock();
  }

 private:
  inline static int depth = 0;  // of the thread that holds the mutex
};

inline bool knows(const Clock& clock, Id stream, uint64_t at) {
  auto found = clock.find(stream);
  return found != clock.end() && found->second >= at;
}

inline void join(Clock& clock, const Clock& other) {
  for (auto [stream, at] : other) clock[stream] = std::max(clock[stream], at);
}

// Appends a line to the file that the environment names.
inline void blame(const std::string& what) {
  const char* path = std::getenv("STRETTO_FAKE_NPU_RACES");
  std::FILE* file = path == nullptr ? nullptr : std::fopen(path, "a");
  if (file == nullptr) return;
  std::fprintf(file, "%s\n", what.c_str());
  std::fclose(file);
}

inline void run_copies(const Clock& known) {
  std::vector<Copy> later;
  for (auto& copy : copies) {
    bool due = knows(known, copy.stream, copy.at);
    if (due) copy.run();
    (due ? finished : later).push_back(std::move(copy));
  }
  copies = std::move(later);
  if (copies.empty()) {
    for (void* data : freed) std::free(data);
    freed.clear();
  }
}

// ---------------------------------------------------------------- work

// A further piece of work on the current stream, which comes after all that the host has waited for.
inline void begin() {
  Lock guard;
  Clock& clock = clocks[current];
  join(clock, host);
  ++clock[current];
  run_copies(clock);
}

inline void poison(Address low, Address high) { std::memset(reinterpret_cast<void*>(low), 0xff, high - low); }

// The work that was begun last reads or writes this memory. `floating`: it may be overwritten with NaN.
inline void use(const void* data, size_t bytes, bool writes, bool floating, const std::string& by) {
  if (bytes == 0) return;
  Lock guard;
  Address low = reinterpret_cast<Address>(data), high = low + bytes;
  auto found = blocks.upper_bound(low);
  if (found == blocks.begin()) return;
  Block& block = (--found)->second;
  if (high > block.high) return;
  const Clock& clock = clocks[current];
  std::vector<Access> kept;
  for (const Access& other : block.accesses) {
    bool overlaps = other.low < high && low < other.high, covered = low <= other.low && other.high <= high;
    bool before = knows(clock, other.stream, other.at);
    if (overlaps && !before && (writes || other.writes)) {
      blame("stream " + std::to_string(current) + (writes ? " writes" : " reads") + " what stream " +
            std::to_string(other.stream) + (other.writes ? " writes" : " reads") +
            ", without waiting for it: " + by + " after " + other.by);
      if (floating) poison(std::max(low, other.low), std::min(high, other.high));
    }
    if (!(covered && before && (writes || !other.writes))) kept.push_back(other);
  }
  kept.push_back({low, high, current, clock.at(current), writes, by});
  block.accesses = std::move(kept);
}

// Put a copy off that the work begun last makes.
inline void defer(std::function<void()> run) {
  Lock guard;
  ++deferred;
  copies.push_back({current, clocks[current][current], std::move(run)});
}

// ---------------------------------------------------------------- memory

inline void allocated(void* data, size_t bytes) {
  Lock guard;
  Address low = reinterpret_cast<Address>(data);
  Clock& clock = clocks[current];
  static int64_t number = 0;
  // earlier work of the stream may still be using this memory
  Access access{low, low + bytes, current, clock[current], true, "its allocation"};
  blocks[low] = {low + bytes, current, {}, {access}, ++number};
}

inline void release(void* data) {
  Lock guard;
  auto found = blocks.find(reinterpret_cast<Address>(data));
  if (found != blocks.end()) {
    Block& block = found->second;
    Clock known = clocks[block.owner];  // it is not used again before the work so far of recorded streams
    for (Id stream : block.recorded) join(known, clocks[stream]);
    for (const Access& access : block.accesses) {
      if (knows(known, access.stream, access.at)) continue;
      blame("memory of stream " + std::to_string(block.owner) + " is freed while stream " +
            std::to_string(access.stream) + (access.writes ? " writes it: " : " reads it: ") + access.by);
      poison(found->first, block.high);
      break;
    }
    blocks.erase(found);
  }
  if (copies.empty()) std::free(data);
  else freed.push_back(data);
}

inline void record(const void* data, Id stream) {
  Lock guard;
  auto found = blocks.upper_bound(reinterpret_cast<Address>(data));
  if (found != blocks.begin()) (--found)->second.recorded.insert(stream);
}

// ---------------------------------------------------------------- waiting

inline void host_waits(const Clock& clock) {
  Lock guard;
  join(host, clock);
  run_copies(host);
}

inline Clock of(Id stream) {
  Lock guard;
  Clock clock = clocks[stream];
  join(clock, host);
  return clock;
}

}  // namespace streams

extern "C" {
int64_t stream_now() { return streams::current; }
void stream_set(int64_t stream) { streams::current = stream; }
void unobserved_set(int on) { streams::unobserved = on != 0; }
int64_t event_record(int64_t stream) {
  streams::Lock guard;
  streams::events.push_back(streams::of(stream));
  return static_cast<int64_t>(streams::events.size()) - 1;
}
void event_wait(int64_t event, int64_t stream) {
  streams::Lock guard;
  streams::join(streams::clocks[stream], streams::events.at(event));
}
void event_synchronize(int64_t event) {
  streams::Lock guard;
  streams::host_waits(streams::events.at(event));
}
void stream_wait(int64_t stream, int64_t other) {
  streams::Lock guard;
  streams::join(streams::clocks[stream], streams::of(other));
}
void stream_synchronize(int64_t stream) { streams::host_waits(streams::of(stream)); }
void device_synchronize() {
  streams::Lock guard;
  for (auto& [stream, clock] : streams::clocks) streams::join(streams::host, clock);
  streams::host_waits(streams::host);
}
// The number of the allocation that begins there; 0: there is none.
int64_t allocation(const void* data) {
  streams::Lock guard;
  auto found = streams::blocks.find(reinterpret_cast<streams::Address>(data));
  return found == streams::blocks.end() ? 0 : found->second.number;
}
int64_t copies_deferred() { return static_cast<int64_t>(streams::deferred); }
}
