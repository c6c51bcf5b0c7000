// Memory for the length of a call, kept for the next one: fresh pages cost as much as the work.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

namespace sparsekv {

// `size` floats, unwritten. A process keeps the last one that was given back; it takes no lock, so
// a forked child may use it at once.
class Workspace {
 public:
  explicit Workspace(size_t size) : block_(kept().exchange(nullptr)) {
    if (block_ && block_->size < size) {
      delete block_;
      block_ = nullptr;
    }
    if (!block_) block_ = new Block{size, std::unique_ptr<float[]>(new float[size])};
  }
  ~Workspace() { delete kept().exchange(block_); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  float* get() const { return block_->floats.get(); }

 private:
  struct Block {
    size_t size;
    std::unique_ptr<float[]> floats;
  };

  static std::atomic<Block*>& kept() {
    static std::atomic<Block*> block{nullptr};
    return block;
  }

  Block* block_;
};

}  // namespace sparsekv
