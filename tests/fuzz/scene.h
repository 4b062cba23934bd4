// A scene: one valid call of the C ABI with the memory it describes, and what a fuzzer may change in it. Descriptors
// may say anything but one thing: that memory is longer than it is, where nothing in the ABI could tell (`data_bytes`
// 0, or more than there is).
#pragma once
#include <math.h>

#include <deque>
#include <functional>
#include <memory>

#include "../../include/kvx_abi.h"
#include "arena.h"

namespace fuzz {

inline int bits_of(int dtype) {
  switch (dtype) {
    case KVX_DTYPE_S64:
    case KVX_DTYPE_U64:
    case KVX_DTYPE_F64: return 64;
    case KVX_DTYPE_F32:
    case KVX_DTYPE_S32:
    case KVX_DTYPE_U32: return 32;
    case KVX_DTYPE_F16:
    case KVX_DTYPE_BF16: return 16;
    case KVX_DTYPE_S4:
    case KVX_DTYPE_E2M1: return 4;
    default: return dtype > 0 && dtype <= KVX_DTYPE_F64 ? 8 : 0;
  }
}

using Shape = std::vector<int64_t>;

// A struct of a call, where it lies, and the places in it that are no plain numbers.
struct Part {
  char* at;
  size_t bytes;
  std::vector<size_t> arrays;    // kvx_array_t
  std::vector<size_t> pointers;  // of memory whose length no field says: another buffer may stand there, or NULL
  std::vector<std::pair<size_t, size_t>> sized;  // a pointer, and the uint64_t that says how many bytes it has
  std::vector<char> honest;
};

class Scene {
 public:
  const char* name;
  std::function<int()> call;           // the status
  std::function<void()> truth;         // after changes: what the ABI cannot see is made true again
  std::function<std::string()> check;  // after OK, where outputs are known: empty, or what is wrong
  std::deque<Buffer> buffers;
  std::vector<Part> parts;
  bool may_alias = true;  // --apart: outputs over inputs are unspecified and harmless, and ASan calls the copy an error
  bool is_aliased = false;  // this case lets two things share memory: outputs are then unspecified

  explicit Scene(const char* text) : name(text) {}

  template <class Struct>
  Struct* add() {
    auto object = std::make_shared<Struct>();
    memset(static_cast<void*>(object.get()), 0, sizeof(Struct));
    structs_.push_back(object);
    parts.push_back(Part{reinterpret_cast<char*>(object.get()), sizeof(Struct), {}, {}, {}, {}});
    return object.get();
  }
  template <class Struct>
  Struct* add_args() {  // v1.2's header
    Struct* s = add<Struct>();
    s->version = KVX_ABI_VERSION, s->struct_bytes = sizeof(Struct);
    return s;
  }

  Buffer& new_buffer(size_t bytes, bool is_output, int index_bytes = 0) {
    buffers.emplace_back(bytes, is_output, index_bytes);
    Buffer& b = buffers.back();
    for (size_t i = 0; i < bytes; i++) b.data[i] = char(i * 37 % 61);
    return b;
  }

  // Arrays. `at` is a field of a struct that add() made.
  kvx_array_t* array(kvx_array_t* at, int dtype, const Shape& shape, bool is_output = false, Shape stride = {}) {
    int64_t last = 0;
    at->ndim = uint32_t(shape.size()), at->dtype = dtype;
    int64_t dense = 1;
    for (size_t i = shape.size(); i-- > 0; dense *= shape[i]) {
      at->shape[i] = shape[i], at->stride[i] = stride.empty() ? dense : stride[i];
      last += (shape[i] - 1) * at->stride[i];
    }
    at->data_bytes = uint64_t((last + 1) * bits_of(dtype) + 7) / 8;
    at->data = new_buffer(at->data_bytes, is_output).data;
    note_array(at);
    if (bits_of(dtype) >= 16 && !(dtype == KVX_DTYPE_S32 || dtype == KVX_DTYPE_S64)) fill_floats(*at);
    return at;
  }
  kvx_array_t* indices(kvx_array_t* at, int dtype, const Shape& shape, const std::vector<int64_t>& values) {
    array(at, dtype, shape);
    const int bytes = bits_of(dtype) / 8;
    buffers.back().index_bytes = bytes;
    for (size_t i = 0; i < at->data_bytes / size_t(bytes); i++) {
      const int64_t value = values[i % values.size()];
      memcpy(buffers.back().data + i * size_t(bytes), &value, size_t(bytes));
    }
    return at;
  }
  void note_array(kvx_array_t* at) { place(at, &Part::arrays); }
  void note_pointer(void* at) { place(at, &Part::pointers); }
  void note_sized(void* pointer, void* length) {
    Part& p = part_of(pointer);
    p.sized.push_back({size_t(static_cast<char*>(pointer) - p.at), size_t(static_cast<char*>(length) - p.at)});
  }
  // Every array of a struct, also those that are absent, so that they may appear.
  void note_arrays_of(kvx_array_t* first, size_t count) {
    for (size_t i = 0; i < count; i++) note_array(first + i);
  }

  void keep() {
    for (Part& p : parts) p.honest.assign(p.at, p.at + p.bytes);
    for (Buffer& b : buffers) b.keep();
  }
  void put_back() {
    for (Part& p : parts) memcpy(p.at, p.honest.data(), p.bytes);
    for (Buffer& b : buffers) b.put_back();
    is_aliased = false;
  }
  std::string damage() const {
    for (const Buffer& b : buffers) {
      const std::string text = b.damage(b.is_output || is_aliased);
      if (!text.empty()) return text;
    }
    return "";
  }

  void lie(Random& random) {
    if (random.chance(4)) return lie_in_table(random);
    Part& p = parts[size_t(random.below(int(parts.size())))];
    const size_t word = size_t(random.below(int(p.bytes / 4))) * 4;
    if (random.chance(6) && !p.arrays.empty()) return lie_about_memory(random, p);
    const bool wide = word % 8 == 0 && word + 8 <= p.bytes && !random.chance(4);
    int64_t old = 0;
    memcpy(&old, p.at + word, wide ? 8 : 4);
    if (!wide) old = int32_t(old);
    const int64_t value = random.hostile(old);
    memcpy(p.at + word, &value, wide ? 8 : 4);
    if (!wide || old == 0 || old > 4096 || old < -4096 || random.chance(2)) return;
    for (Part& other : parts)  // everywhere it is said: lies that agree get further
      for (size_t i = 0; i + 8 <= other.bytes; i += 8)
        if (memcmp(other.at + i, &old, 8) == 0) memcpy(other.at + i, &value, 8);
  }

  // No descriptor may claim memory that is not there.
  void settle(Random& random) {
    for (Part& p : parts) {
      for (size_t at : p.arrays) settle_array(random, reinterpret_cast<kvx_array_t*>(p.at + at));
      for (size_t at : p.pointers) {
        void *now, *before;
        memcpy(&now, p.at + at, sizeof now), memcpy(&before, p.honest.data() + at, sizeof before);
        if (now != nullptr && now != before) memcpy(p.at + at, &before, sizeof before);
      }
      for (auto [pointer, length] : p.sized) {
        void* now;
        uint64_t bytes;
        memcpy(&now, p.at + pointer, sizeof now), memcpy(&bytes, p.at + length, 8);
        const uint64_t there = available(now);
        if (there == 0) now = nullptr;
        if (bytes == 0 || bytes > there) bytes = there;
        memcpy(p.at + pointer, &now, sizeof now), memcpy(p.at + length, &bytes, 8);
      }
    }
    if (truth) truth();
  }

  // Bytes from here to the end of the buffer it is in; 0: in none.
  uint64_t available(const void* at) const {
    for (const Buffer& b : buffers)
      if (b.contains(at)) return uint64_t(b.data + b.bytes - static_cast<const char*>(at));
    return 0;
  }

 private:
  std::vector<std::shared_ptr<void>> structs_;

  Part& part_of(void* field) {
    for (Part& p : parts)
      if (static_cast<char*>(field) >= p.at && static_cast<char*>(field) < p.at + p.bytes) return p;
    fprintf(stderr, "%s: a field of no struct\n", name), exit(3);
  }
  void place(void* field, std::vector<size_t> Part::* list) {
    Part& p = part_of(field);
    const size_t at = size_t(static_cast<char*>(field) - p.at);
    for (size_t known : p.*list)
      if (known == at) return;
    (p.*list).push_back(at);
  }

  void fill_floats(const kvx_array_t& a) {
    Buffer& b = buffers.back();
    for (size_t i = 0; i < b.bytes * 8 / size_t(bits_of(a.dtype)); i++) {
      const float x = float(int(i * 7 % 17) - 8) / 4;
      uint32_t word;
      memcpy(&word, &x, 4);
      if (a.dtype == KVX_DTYPE_F32) memcpy(b.data + 4 * i, &word, 4);
      const uint16_t half = a.dtype == KVX_DTYPE_BF16 ? uint16_t(word >> 16) : uint16_t(0x3c00 + i % 64 * 8);
      if (bits_of(a.dtype) == 16) memcpy(b.data + 2 * i, &half, 2);
    }
  }

  void lie_in_table(Random& random) {
    Buffer& b = buffers[size_t(random.below(int(buffers.size())))];
    if (!b.index_bytes) return;
    const size_t at = size_t(random.below(int(b.bytes) / b.index_bytes)) * size_t(b.index_bytes);
    int64_t old = 0;
    memcpy(&old, b.data + at, size_t(b.index_bytes));
    const int64_t value = random.hostile(b.index_bytes == 4 ? int32_t(old) : old);
    memcpy(b.data + at, &value, size_t(b.index_bytes));
    memcpy(b.saved.data() + at, &value, size_t(b.index_bytes));  // what it must still be after the call
    touched_.push_back({&b, at, old});
  }

  void lie_about_memory(Random& random, Part& p) {
    kvx_array_t* a = reinterpret_cast<kvx_array_t*>(p.at + p.arrays[size_t(random.below(int(p.arrays.size())))]);
    char* data = static_cast<char*>(a->data);
    switch (random.below(may_alias ? 4 : 3)) {
      case 0: a->data = nullptr; break;
      case 1:
        if (data) a->data = data + 1 + random.below(8);
        break;
      case 2: a->data = reinterpret_cast<void*>(random.hostile(0)); break;  // nowhere; settled below
      default: {
        const Buffer& b = buffers[size_t(random.below(int(buffers.size())))];
        a->data = b.data + (random.chance(2) ? 0 : random.below(int(b.bytes))), a->data_bytes = 0, is_aliased = true;
      }
    }
  }

  void settle_array(Random& random, kvx_array_t* a) {
    if (a->data == nullptr) return;
    const uint64_t there = available(a->data);
    if (there == 0) {  // nowhere: believed only where nothing is read
      bool empty = false;
      for (uint32_t i = 0; i < a->ndim && i < 5; i++) empty |= a->shape[i] == 0;
      if (!empty) a->data = nullptr;
      return;
    }
    if (a->data_bytes != 0 && a->data_bytes <= there) return;
    a->data_bytes = there;
    if (!random.chance(4) || a->ndim > 5) return;
    __int128 last = 0;
    for (uint32_t i = 0; i < a->ndim; i++) {
      if (a->shape[i] < 1 || a->stride[i] < 0) return;
      last += __int128(a->shape[i] - 1) * a->stride[i];
    }
    if (bits_of(a->dtype) && (last + 1) * bits_of(a->dtype) <= __int128(there) * 8)
      a->data_bytes = 0;  // unknown, and true
  }

  struct Touched {
    Buffer* buffer;
    size_t at;
    int64_t old;
  };
  std::vector<Touched> touched_;

 public:
  // Tables as they were; before put_back.
  void undo_tables() {
    for (size_t i = touched_.size(); i-- > 0;)
      memcpy(touched_[i].buffer->saved.data() + touched_[i].at, &touched_[i].old,
             size_t(touched_[i].buffer->index_bytes));
    touched_.clear();
  }
};

}  // namespace fuzz
