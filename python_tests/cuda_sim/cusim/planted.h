// Which of the bugs that were planted in a copy of the sources is there: one, by its number, or none (0).
#pragma once

namespace cusim {

inline int& planted_bug() {
  static int value = 0;
  return value;
}

inline int planted(int bug) { return planted_bug() == bug; }

}  // namespace cusim

// Called through ctypes by the tests.
extern "C" __attribute__((used)) inline void cusim_plant(int bug) { cusim::planted_bug() = bug; }
