// The work of a kernel that reads and writes many tensors in one launch, in
// code that a GPU's threads and a CPU's loop run alike: a test runs every tile
// on the CPU.
//
// Sizes, strides and indices are 64-bit and in elements.
#pragma once

#include <c10/macros/Macros.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace lowtide::ops {

// Matrices of equal size whose rows are runs of consecutive elements.
struct Transfer {
  void* to;
  const void* from;
  std::int64_t columns;  // of a row
  std::int64_t rows;     // of a matrix
  std::int64_t to_row;   // from a row to the next
  std::int64_t from_row;
  std::int64_t to_matrix;  // from a matrix to the next
  std::int64_t from_matrix;
  std::int64_t elements;  // of all matrices
};

// What one group of threads does at a time.
inline constexpr std::int64_t kTileElements = 4096;
// Shorter rows share tiles, element by element.
inline constexpr std::int64_t kWideColumns = 512;
inline constexpr int kTileThreads = 256;

// Division is slow on a GPU, of 64 bits more so.
C10_HOST_DEVICE inline std::int64_t divide(std::int64_t a, std::int64_t b) {
  return ((a | b) >> 32) == 0
             ? static_cast<std::int64_t>(static_cast<std::uint32_t>(a) /
                                         static_cast<std::uint32_t>(b))
             : a / b;
}

C10_HOST_DEVICE inline std::int64_t tiles_of(std::int64_t elements) {
  return divide(elements + kTileElements - 1, kTileElements);
}

C10_HOST_DEVICE inline std::int64_t num_tiles(const Transfer& t) {
  return t.columns < kWideColumns
             ? tiles_of(t.elements)
             : divide(t.elements, t.columns) * tiles_of(t.columns);
}

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Vector {
  T values[kWidth];
};

// How many elements are 16 bytes of the wider type.
template <typename To, typename From>
inline constexpr int kVectorWidth = 16 /
                                    static_cast<int>(sizeof(To) > sizeof(From)
                                                         ? sizeof(To)
                                                         : sizeof(From));

template <typename T, int kWidth>
C10_HOST_DEVICE bool aligned(const T* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) %
             sizeof(Vector<T, kWidth>) ==
         0;
}

template <typename T, int kWidth>
C10_HOST_DEVICE Vector<T, kWidth> load(const T* from, bool as_vector) {
  if (as_vector) {
    return *reinterpret_cast<const Vector<T, kWidth>*>(from);
  }
  Vector<T, kWidth> loaded;
  for (int i = 0; i < kWidth; ++i) {
    loaded.values[i] = from[i];
  }
  return loaded;
}

// What a GPU stores in one instruction.
struct alignas(16) Words4 {
  std::uint32_t x, y, z, w;
};
struct alignas(8) Words2 {
  std::uint32_t x, y;
};

// Left alone, nvcc splits a vector of computed values.
C10_HOST_DEVICE inline void store_at_once(void* to, const Words4& words) {
#ifdef __CUDA_ARCH__
  __stwb(static_cast<uint4*>(to),
         make_uint4(words.x, words.y, words.z, words.w));
#else
  std::memcpy(to, &words, sizeof(words));
#endif
}
C10_HOST_DEVICE inline void store_at_once(void* to, const Words2& words) {
#ifdef __CUDA_ARCH__
  __stwb(static_cast<uint2*>(to), make_uint2(words.x, words.y));
#else
  std::memcpy(to, &words, sizeof(words));
#endif
}

template <typename T, int kWidth>
C10_HOST_DEVICE void store(Vector<T, kWidth>* to,
                           const Vector<T, kWidth>& values) {
  if constexpr (sizeof(values) == sizeof(Words4)) {
    store_at_once(to, std::bit_cast<Words4>(values));
  } else if constexpr (sizeof(values) == sizeof(Words2)) {
    store_at_once(to, std::bit_cast<Words2>(values));
  } else {
    *to = values;
  }
}

// Elements of a run of `elements` at `pointer` ahead of the first vector.
template <typename T, int kWidth>
C10_HOST_DEVICE std::int64_t unaligned_head(const T* pointer,
                                            std::int64_t elements) {
  const auto past = reinterpret_cast<std::uintptr_t>(pointer) %
                    sizeof(Vector<T, kWidth>) / sizeof(T);
  const auto head = past == 0 ? 0 : kWidth - static_cast<std::int64_t>(past);
  return head < elements ? head : elements;
}

template <typename To, typename From, int kWidth, typename Operation>
C10_HOST_DEVICE void finish(To* to, const Vector<To, kWidth>& before,
                            const Vector<From, kWidth>& from,
                            const Operation& operation) {
  Vector<To, kWidth> result;
  for (int i = 0; i < kWidth; ++i) {
    result.values[i] = operation(before.values[i], from.values[i]);
  }
  if constexpr (Operation::kWrites) {
    store(reinterpret_cast<Vector<To, kWidth>*>(to), result);
  }
}

template <typename To, typename From, typename Operation>
C10_HOST_DEVICE void run_one(To* to, const From* from,
                             const Operation& operation) {
  Vector<To, 1> before{};
  if constexpr (Operation::kReads) {
    before.values[0] = *to;
  }
  finish(to, before, Vector<From, 1>{{*from}}, operation);
}

// What `thread` has of one run of elements.
template <typename To, typename From, typename Operation>
C10_HOST_DEVICE void run_of_tile(To* to, const From* from,
                                 std::int64_t elements, int thread,
                                 const Operation& operation) {
  constexpr int kWidth = kVectorWidth<To, From>;
  constexpr int kInFlight =
      static_cast<int>(kTileElements) / kTileThreads / kWidth;
  const std::int64_t head = unaligned_head<To, kWidth>(to, elements);
  const std::int64_t body = (elements - head) / kWidth * kWidth;
  const bool vectors = aligned<From, kWidth>(from + head);
  // What precedes and follows the vectors: fewer than kWidth elements each.
  const std::int64_t tail = head + body;
  if (thread < head) {
    run_one(to + thread, from + thread, operation);
  }
  if (tail + thread < elements) {
    run_one(to + tail + thread, from + tail + thread, operation);
  }
  // All loads of a thread are under way before its first store.
  Vector<From, kWidth> loaded[kInFlight] = {};
  Vector<To, kWidth> before[kInFlight] = {};
  for (int k = 0; k < kInFlight; ++k) {
    const std::int64_t i = (k * kTileThreads + thread) * std::int64_t{kWidth};
    if (i < body) {
      loaded[k] = load<From, kWidth>(from + head + i, vectors);
      if constexpr (Operation::kReads) {
        before[k] = load<To, kWidth>(to + head + i, true);
      }
    }
  }
  for (int k = 0; k < kInFlight; ++k) {
    const std::int64_t i = (k * kTileThreads + thread) * std::int64_t{kWidth};
    if (i < body) {
      finish(to + head + i, before[k], loaded[k], operation);
    }
  }
}

// What `thread` of kTileThreads does of tile `tile` of `t`.
template <typename To, typename From, typename Operation>
C10_HOST_DEVICE void run_tile(const Transfer& t, std::int64_t tile, int thread,
                              const Operation& operation) {
  auto* const to = static_cast<To*>(t.to);
  const auto* const from = static_cast<const From*>(t.from);
  if (t.columns >= kWideColumns) {
    const std::int64_t tiles = tiles_of(t.columns);
    const std::int64_t row = divide(tile, tiles);
    const std::int64_t begin = (tile - row * tiles) * kTileElements;
    const std::int64_t left = t.columns - begin;
    const std::int64_t matrix = divide(row, t.rows);
    const std::int64_t r = row - matrix * t.rows;
    run_of_tile(to + matrix * t.to_matrix + r * t.to_row + begin,
                from + matrix * t.from_matrix + r * t.from_row + begin,
                left < kTileElements ? left : kTileElements, thread, operation);
    return;
  }
  const std::int64_t begin = tile * kTileElements;
  const std::int64_t left = t.elements - begin;
  const std::int64_t end = left < kTileElements ? left : kTileElements;
  for (std::int64_t i = thread; i < end; i += kTileThreads) {
    const std::int64_t row = divide(begin + i, t.columns);
    const std::int64_t column = begin + i - row * t.columns;
    const std::int64_t matrix = divide(row, t.rows);
    const std::int64_t r = row - matrix * t.rows;
    run_one(to + matrix * t.to_matrix + r * t.to_row + column,
            from + matrix * t.from_matrix + r * t.from_row + column, operation);
  }
}

// A NaN keeps its bits where nothing is converted.
template <typename To, typename From>
C10_HOST_DEVICE To converted(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else {
    return static_cast<To>(static_cast<float>(value));
  }
}

// Operations, element by element, computed in fp32 and rounded once, as
// at::copy_, at::add_ and at::mul_ do.  kReads: what is there before the write.
struct Copy {
  static constexpr bool kReads = false;
  static constexpr bool kWrites = true;

  template <typename To, typename From>
  C10_HOST_DEVICE To operator()(To, From from) const {
    return converted<To>(from);
  }
};

struct Add {
  static constexpr bool kReads = true;
  static constexpr bool kWrites = true;

  template <typename To, typename From>
  C10_HOST_DEVICE To operator()(To before, From from) const {
    return static_cast<To>(static_cast<float>(before) +
                           static_cast<float>(from));
  }
};

struct Scale {
  static constexpr bool kReads = false;
  static constexpr bool kWrites = true;
  float factor;

  template <typename To, typename From>
  C10_HOST_DEVICE To operator()(To, From from) const {
    return static_cast<To>(static_cast<float>(from) * factor);
  }
};

// Adds up the squares of what is read, in fp32 for one tile.
struct SquareSum {
  static constexpr bool kReads = false;
  static constexpr bool kWrites = false;
  float* sum;

  template <typename To, typename From>
  C10_HOST_DEVICE To operator()(To before, From from) const {
    const auto value = static_cast<float>(from);
    *sum += value * value;
    return before;
  }
};

}  // namespace lowtide::ops
