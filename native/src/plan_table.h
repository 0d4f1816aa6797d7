// The plans of calls that were made before. All access holds the GIL.
#pragma once

#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "call_key.h"
#include "plan.h"

namespace outblas {

class PlanTable {
 public:
  // A caller keeps what it found, because a launch may clear the table.
  std::shared_ptr<Plan> find(const CallKey& key) const {
    const auto alike = plans_.find(key.hash());
    if (alike != plans_.end()) {
      for (const auto& [known, plan] : alike->second) {
        if (known == key) {
          return plan;
        }
      }
    }
    return nullptr;
  }

  // Adds a plan, in the place of the oldest ones if there are too many.
  void add(const CallKey& key, std::shared_ptr<Plan> plan, size_t most) {
    if (find(key) != nullptr) {
      return;
    }
    while (order_.size() >= most && !order_.empty()) {
      const auto oldest = plans_.find(order_.front());
      order_.pop_front();
      oldest->second.pop_front();
      if (oldest->second.empty()) {
        plans_.erase(oldest);
      }
    }
    plans_[key.hash()].emplace_back(key, std::move(plan));
    order_.push_back(key.hash());
  }

  void clear() {
    // Destroying a plan runs Python code, which may come back here.
    const auto plans = std::exchange(plans_, {});
    order_.clear();
  }

  size_t size() const { return order_.size(); }

 private:
  std::unordered_map<uint64_t, std::deque<std::pair<CallKey, std::shared_ptr<Plan>>>> plans_;
  std::deque<uint64_t> order_;  // hashes of keys, the oldest first
};

}  // namespace outblas
