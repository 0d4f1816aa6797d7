// The plans of calls that were made before. All access holds the GIL.
#pragma once

#include <list>
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
    const auto [first, last] = places_.equal_range(key.hash());
    for (auto place = first; place != last; ++place) {
      if (place->second->key == key) {
        place->second->used = true;
        return place->second->plan;
      }
    }
    return nullptr;
  }

  // Adds a plan, in the place of those that no call took since the hand of the clock passed them if
  // there are too many. Returns whether plans were forgotten.
  bool add(const CallKey& key, std::shared_ptr<Plan> plan, size_t most) {
    if (find(key) != nullptr) {
      return false;
    }
    std::vector<std::shared_ptr<Plan>> forgotten;  // destroying them runs Python code: at the end
    while (entries_.size() >= most && !entries_.empty()) {
      const auto entry = entries_.begin();
      if (entry->used) {
        entry->used = false;
        entries_.splice(entries_.end(), entries_, entry);
        continue;
      }
      auto place = places_.find(entry->key.hash());
      while (place->second != entry) {
        ++place;
      }
      places_.erase(place);
      forgotten.push_back(std::move(entry->plan));
      entries_.erase(entry);
    }
    entries_.push_back({key, std::move(plan)});
    places_.emplace(key.hash(), std::prev(entries_.end()));
    return !forgotten.empty();
  }

  void clear() {
    // Destroying a plan runs Python code, which may come back here.
    const auto entries = std::exchange(entries_, {});
    places_.clear();
  }

  size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    CallKey key;
    std::shared_ptr<Plan> plan;
    bool used = false;
  };

  std::list<Entry> entries_;  // in the order of the clock, whose hand is at the first
  std::unordered_multimap<uint64_t, std::list<Entry>::iterator> places_;  // by the hashes of keys
};

}  // namespace outblas
