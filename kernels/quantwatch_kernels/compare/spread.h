// Rows in equal parts on as many threads: `work(first, last)` for each part, once.
//
// The threads are torch's own, of which native.py tells us. They wait for their next work without
// giving up their cores: others beside them would get half of one each. Without them the calling
// thread does it all. `work` must not throw: nothing may leave a team but by returning.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

// GOMP_parallel(function, data, threads, flags): `function(data)` once on each thread of a team,
// the caller's among them.
using Team = void (*)(void (*)(void*), void*, unsigned, unsigned);

static Team spread_team = nullptr;  // each library's own

extern "C" void spread_on(Team team) { spread_team = team; }

template <typename Work>
struct Parts {
  const Work& work;
  const int64_t rows, part;
  std::atomic<int64_t> next{0};

  // Parts that nobody has begun, until there are none: a team may have fewer threads than parts.
  void run() {
    for (;;) {
      const int64_t first = part * next.fetch_add(1);
      if (first >= rows) return;
      work(first, std::min(first + part, rows));
    }
  }
};

template <typename Work>
void spread(int64_t rows, int64_t threads, const Work& work) {
  const int64_t parts = std::max<int64_t>(threads, 1), part = (rows + parts - 1) / parts;
  if (part >= rows || spread_team == nullptr) {
    for (int64_t first = 0; first < rows; first += part)
      work(first, std::min(first + part, rows));
    return;
  }
  Parts<Work> all{work, rows, part};
  const auto run = [](void* parts) { static_cast<Parts<Work>*>(parts)->run(); };
  // 0: as many as torch has. Another number would end some of its threads, to be started anew.
  spread_team(run, &all, 0, 0);
}
