// The work of a kernel that reads and writes many tensors in one launch, in
// code that a GPU's threads and a CPU's loop run alike: a test runs every tile
// on the CPU.
//
// Sizes, strides and indices are 64-bit and in elements.
#pragma once

#include <c10/macros/Macros.h>

#include <cstdint>
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

// Elements of a run of `elements` at `pointer` ahead of the first vector.
template <typename T, int kWidth>
C10_HOST_DEVICE std::int64_t unaligned_head(const T* pointer,
                                            std::int64_t elements) {
  const auto past = reinterpret_cast<std::uintptr_t>(pointer) %
                    sizeof(Vector<T, kWidth>) / sizeof(T);
  const auto head = past == 0 ? 0 : kWidth - static_cast<std::int64_t>(past);
  return head < elements ? head : elements;
}

// Calls write(to, from) for what `thread` has of one run of elements.  `write`
// takes vectors of kWidth elements and of one.
template <typename To, typename From, typename Write>
C10_HOST_DEVICE void run_of_tile(To* to, const From* from,
                                 std::int64_t elements, int thread,
                                 const Write& write) {
  constexpr int kWidth = kVectorWidth<To, From>;
  constexpr int kInFlight =
      static_cast<int>(kTileElements) / kTileThreads / kWidth;
  const std::int64_t head = unaligned_head<To, kWidth>(to, elements);
  const std::int64_t body = (elements - head) / kWidth * kWidth;
  const bool vectors = aligned<From, kWidth>(from + head);
  // Whatever precedes and follows the vectors: fewer than kWidth each.
  const std::int64_t tail = head + body;
  const auto single = [&](std::int64_t i) {
    Vector<From, 1> one{{from[i]}};
    write(reinterpret_cast<Vector<To, 1>*>(to + i), one);
  };
  if (thread < head) {
    single(thread);
  }
  if (tail + thread < elements && thread < kWidth) {
    single(tail + thread);
  }
  // All loads of a thread are under way before its first store.
  Vector<From, kWidth> loaded[kInFlight] = {};
  for (int k = 0; k < kInFlight; ++k) {
    const std::int64_t i = (k * kTileThreads + thread) * std::int64_t{kWidth};
    if (i < body) {
      loaded[k] = load<From, kWidth>(from + head + i, vectors);
    }
  }
  for (int k = 0; k < kInFlight; ++k) {
    const std::int64_t i = (k * kTileThreads + thread) * std::int64_t{kWidth};
    if (i < body) {
      write(reinterpret_cast<Vector<To, kWidth>*>(to + head + i), loaded[k]);
    }
  }
}

// What `thread` of kTileThreads does of tile `tile` of `t`.
template <typename To, typename From, typename Write>
C10_HOST_DEVICE void run_tile(const Transfer& t, std::int64_t tile, int thread,
                              const Write& write) {
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
                left < kTileElements ? left : kTileElements, thread, write);
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
    const Vector<From, 1> one{
        {from[matrix * t.from_matrix + r * t.from_row + column]}};
    write(reinterpret_cast<Vector<To, 1>*>(to + matrix * t.to_matrix +
                                           r * t.to_row + column),
          one);
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

// What is written: computed in fp32, rounded once, as at::copy_, at::add_ and
// at::mul_ do.
struct CopyWrite {
  template <typename To, typename From, int kWidth>
  C10_HOST_DEVICE void operator()(Vector<To, kWidth>* to,
                                  const Vector<From, kWidth>& from) const {
    Vector<To, kWidth> result;
    for (int i = 0; i < kWidth; ++i) {
      result.values[i] = converted<To>(from.values[i]);
    }
    *to = result;
  }
};

struct AddWrite {
  template <typename To, typename From, int kWidth>
  C10_HOST_DEVICE void operator()(Vector<To, kWidth>* to,
                                  const Vector<From, kWidth>& from) const {
    Vector<To, kWidth> result = *to;
    for (int i = 0; i < kWidth; ++i) {
      result.values[i] = static_cast<To>(static_cast<float>(result.values[i]) +
                                         static_cast<float>(from.values[i]));
    }
    *to = result;
  }
};

struct ScaleWrite {
  float factor;

  template <typename To, typename From, int kWidth>
  C10_HOST_DEVICE void operator()(Vector<To, kWidth>* to,
                                  const Vector<From, kWidth>& from) const {
    Vector<To, kWidth> result;
    for (int i = 0; i < kWidth; ++i) {
      result.values[i] =
          static_cast<To>(static_cast<float>(from.values[i]) * factor);
    }
    *to = result;
  }
};

}  // namespace lowtide::ops
