// Rows in equal parts on as many threads: `work(first, last)` for each part, once.

#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

template <typename Work>
void spread(int64_t rows, int64_t threads, const Work& work) {
  const int64_t part = (rows + threads - 1) / std::max<int64_t>(threads, 1);
  std::vector<std::thread> others;
  for (int64_t first = part; first < rows; first += part) {
    const int64_t last = std::min(first + part, rows);
    try {
      others.emplace_back(work, first, last);
    } catch (const std::exception&) {  // no more threads here: nothing may leave through C
      work(first, last);
    }
  }
  work(0, std::min(part, rows));
  for (auto& each : others) each.join();
}
