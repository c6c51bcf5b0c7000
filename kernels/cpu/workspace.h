// Memory for the length of a call, kept for the next one: fresh pages cost as much as the work.
#pragma once

#include <atomic>
#include <cstddef>
#include <new>

namespace sparsekv {

// `size` floats, unwritten, from a cache line on. A process keeps the last one that was given back;
// it takes no lock, so a forked child may use it at once.
class Workspace {
 public:
  explicit Workspace(size_t size) : block_(kept().exchange(nullptr)) {
    if (block_ && block_->size < size) {
      delete block_;
      block_ = nullptr;
    }
    if (!block_) block_ = new Block(size);
  }
  ~Workspace() { delete kept().exchange(block_); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  float* get() const { return block_->floats; }

 private:
  struct Block {
    explicit Block(size_t size)
        : size(size), floats(static_cast<float*>(::operator new(size * sizeof(float), kLine))) {}
    ~Block() { ::operator delete(floats, kLine); }
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    static constexpr std::align_val_t kLine{64};
    const size_t size;
    float* const floats;
  };

  static std::atomic<Block*>& kept() {
    static std::atomic<Block*> block{nullptr};
    return block;
  }

  Block* block_;
};

}  // namespace sparsekv
