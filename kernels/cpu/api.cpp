#include "api.h"

#include <atomic>
#include <deque>
#include <memory>
#include <vector>

#include "gather.h"
#include "isa.h"
#include "job_api.h"
#include "partial_attention.h"
#include "pool.h"

namespace sparsekv {

namespace {

std::atomic<const Isa*>& isa_in_use() {
  static std::atomic<const Isa*> isa{find_isa(nullptr)};
  return isa;
}

const Kernel& kernel_of(int64_t num_heads, int64_t num_kv_heads, int64_t num_queries,
                        int32_t dtype) {
  return kernel_for(*isa_in_use().load(), num_heads / num_kv_heads, num_queries, Dtype(dtype));
}

const Kernel& kernel_of(const sparsekv_partial_attention_call& call) {
  return kernel_of(call.num_heads, call.num_kv_heads, call.num_queries, call.dtype);
}

// A call with small tables of its own.
struct SubmittedAttention {
  explicit SubmittedAttention(const sparsekv_partial_attention_call& given)
      : call(given),
        kernel(kernel_of(given)),
        positions(copy(call.positions, given.num_segments)),
        row_table(copy(call.row_table, given.num_segments * given.batch)),
        key_start(copy(call.key_start, given.batch)) {}
  SubmittedAttention(const SubmittedAttention&) = delete;
  SubmittedAttention& operator=(const SubmittedAttention&) = delete;

  sparsekv_partial_attention_call call;
  const Kernel& kernel;
  const std::vector<int64_t> positions, row_table, key_start;

 private:
  // Points `table` to the copy, which does not move.
  static std::vector<int64_t> copy(const int64_t*& table, int64_t size) {
    if (!table) return {};
    std::vector<int64_t> copied(table, table + size);
    table = copied.data();
    return copied;
  }
};

}  // namespace

}  // namespace sparsekv

using namespace sparsekv;

int32_t sparsekv_partial_attention(const sparsekv_partial_attention_call* call) {
  if (!call) return SPARSEKV_BAD_ARGUMENT;
  const int32_t wrong = check(*call);
  if (wrong != SPARSEKV_OK) return wrong;
  try {
    partial_attention({{*call, kernel_of(*call)}});
  } catch (...) {  // of whatever kind: nothing may leave a C interface
    return SPARSEKV_NO_MEMORY;
  }
  return SPARSEKV_OK;
}

int32_t sparsekv_gather_blocks(const sparsekv_gather_blocks_call* call) {
  if (!call) return SPARSEKV_BAD_ARGUMENT;
  const int32_t wrong = check(*call);
  if (wrong != SPARSEKV_OK) return wrong;
  try {
    gather_blocks(*call, copy_kernel_for(isa_in_use().load()->vectors->name));
  } catch (...) {
    return SPARSEKV_NO_MEMORY;
  }
  return SPARSEKV_OK;
}

int32_t sparsekv_submit_partial_attention(const sparsekv_partial_attention_call* calls,
                                          int64_t count, const sparsekv_signal* signal,
                                          int64_t* job) {
  if (!calls || count < 1) return SPARSEKV_BAD_ARGUMENT;
  for (int64_t i = 0; i < count; i++) {
    sparsekv_partial_attention_call known = calls[i];
    known.block_size = 0;  // the lists may be written until the flag is set
    const int32_t wrong = check(known);
    if (wrong != SPARSEKV_OK) return wrong;
  }
  return submit_job(signal, job, [&] {
    const auto submitted = std::make_shared<std::deque<SubmittedAttention>>();
    for (int64_t i = 0; i < count; i++) submitted->emplace_back(calls[i]);
    return [submitted] {
      std::vector<KernelCall> checked;
      for (const SubmittedAttention& each : *submitted) {
        const int32_t wrong = check(each.call);
        if (wrong != SPARSEKV_OK) return wrong;
        checked.push_back({each.call, each.kernel});
      }
      partial_attention(checked);
      return int32_t(SPARSEKV_OK);
    };
  });
}

int32_t sparsekv_submit_gather_blocks(const sparsekv_gather_blocks_call* calls, int64_t count,
                                      const sparsekv_signal* signal, int64_t* job) {
  if (!calls || count < 1) return SPARSEKV_BAD_ARGUMENT;
  const CopyKernel& kernel = copy_kernel_for(isa_in_use().load()->vectors->name);
  return submit_job(signal, job, [&] {
    return [submitted = std::vector(calls, calls + count), kernel = &kernel] {
      for (const sparsekv_gather_blocks_call& each : submitted) {
        const int32_t wrong = check(each);
        if (wrong != SPARSEKV_OK) return wrong;
        gather_blocks(each, *kernel);
      }
      return int32_t(SPARSEKV_OK);
    };
  });
}

int32_t sparsekv_interface(void) { return SPARSEKV_INTERFACE; }

#if !defined(SPARSEKV_FINGERPRINT)
#define SPARSEKV_FINGERPRINT ""
#endif
const char* sparsekv_fingerprint(void) { return SPARSEKV_FINGERPRINT; }

const char* sparsekv_isa(void) { return isa_in_use().load()->name; }

const char* sparsekv_kernel(int64_t num_heads, int64_t num_kv_heads, int64_t num_queries,
                            int32_t dtype) {
  if (num_kv_heads < 1) return nullptr;
  return kernel_of(num_heads, num_kv_heads, num_queries, dtype).name;
}

int32_t sparsekv_set_isa(const char* name) {
  const Isa* isa = find_isa(name);
  if (!isa) return SPARSEKV_NO_SUCH_ISA;
  isa_in_use() = isa;
  return SPARSEKV_OK;
}

int32_t sparsekv_threads(void) { return thread_count(); }

int32_t sparsekv_set_threads(int32_t threads) {
  if (threads < 0 || threads > 4096) return SPARSEKV_BAD_ARGUMENT;
  set_thread_count(threads);
  return SPARSEKV_OK;
}
