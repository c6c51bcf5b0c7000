// How fast the threads of this machine read, write and copy memory with nothing else to do.
//
// Every thread is pinned to a processor of its own and takes pieces of the memory one after the
// other. Time counts from the first thread's first piece to the last thread's last.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define INLINE_FOR(isa) static inline __attribute__((always_inline, target(isa)))
#define TARGET(isa) static __attribute__((target(isa)))
#endif

enum kind { READ, READ_PREFETCH, WRITE, WRITE_STREAM, COPY_MEMCPY, COPY_STREAM, FILL, NUM_KINDS };

enum { AHEAD = 4096, LINE = 64, STEP = 4 * LINE };

// Sizes are multiples of STEP, addresses of LINE. What is read is summed up, as 64-bit words, so
// that the loads cannot be left out.
typedef uint64_t (*body)(char* target, const char* source, size_t bytes);

static inline __attribute__((always_inline)) uint64_t read_words(const char* source, size_t bytes,
                                                                 size_t ahead) {
  const uint64_t* words = (const uint64_t*)source;
  uint64_t sums[8] = {0};
  for (size_t i = 0; i < bytes / 8; i += 8) {
    if (ahead) __builtin_prefetch(source + i * 8 + ahead);
    for (int j = 0; j < 8; j++) sums[j] += words[i + j];
  }
  uint64_t sum = 0;
  for (int j = 0; j < 8; j++) sum += sums[j];
  return sum;
}

static uint64_t read_portable(char* target, const char* source, size_t bytes) {
  (void)target;
  return read_words(source, bytes, 0);
}

static uint64_t read_prefetch_portable(char* target, const char* source, size_t bytes) {
  (void)target;
  return read_words(source, bytes, AHEAD);
}

static uint64_t write_portable(char* target, const char* source, size_t bytes) {
  (void)source;
  memset(target, 1, bytes);
  return 0;
}

static uint64_t copy_memcpy(char* target, const char* source, size_t bytes) {
  memcpy(target, source, bytes);
  return 0;
}

// Random numbers, 1/8 to 2 in size when read as bfloat16. There is no source: its address is the
// number of the first byte, from which the numbers are made.
static uint64_t fill(char* target, const char* source, size_t bytes) {
  const uint64_t first = (uint64_t)(uintptr_t)source / 8 + 1;
  uint64_t* words = (uint64_t*)target;
  for (size_t i = 0; i < bytes / 8; i++) {
    uint64_t x = (first + i) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    words[i] = ((x ^ (x >> 31)) & 0x81ff81ff81ff81ffu) | 0x3e003e003e003e00u;
  }
  return 0;
}

#if defined(__x86_64__)

INLINE_FOR("avx512f") uint64_t read_512(const char* source, size_t bytes, size_t ahead) {
  __m512i sums[4];
  for (int j = 0; j < 4; j++) sums[j] = _mm512_setzero_si512();
  for (size_t i = 0; i < bytes; i += STEP) {
    for (int j = 0; j < 4; j++) {
      const char* line = source + i + j * LINE;
      if (ahead) _mm_prefetch(line + ahead, _MM_HINT_T0);
      sums[j] = _mm512_add_epi64(sums[j], _mm512_load_si512(line));
    }
  }
  sums[0] = _mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]),
                             _mm512_add_epi64(sums[2], sums[3]));
  return (uint64_t)_mm512_reduce_add_epi64(sums[0]);
}

TARGET("avx512f") uint64_t read_avx512(char* target, const char* source, size_t bytes) {
  (void)target;
  return read_512(source, bytes, 0);
}

TARGET("avx512f") uint64_t read_prefetch_avx512(char* target, const char* source, size_t bytes) {
  (void)target;
  return read_512(source, bytes, AHEAD);
}

TARGET("avx512f") uint64_t write_stream_avx512(char* target, const char* source, size_t bytes) {
  (void)source;
  const __m512i ones = _mm512_set1_epi8(1);
  for (size_t i = 0; i < bytes; i += LINE) _mm512_stream_si512((__m512i*)(target + i), ones);
  _mm_sfence();
  return 0;
}

TARGET("avx512f") uint64_t copy_stream_avx512(char* target, const char* source, size_t bytes) {
  for (size_t i = 0; i < bytes; i += STEP) {
    __m512i lines[4];
    for (int j = 0; j < 4; j++) lines[j] = _mm512_load_si512(source + i + j * LINE);
    for (int j = 0; j < 4; j++) _mm512_stream_si512((__m512i*)(target + i + j * LINE), lines[j]);
  }
  _mm_sfence();
  return 0;
}

INLINE_FOR("avx2") uint64_t read_256(const char* source, size_t bytes, size_t ahead) {
  __m256i sums[8];
  for (int j = 0; j < 8; j++) sums[j] = _mm256_setzero_si256();
  for (size_t i = 0; i < bytes; i += STEP) {
    for (int j = 0; j < 8; j++) {
      const char* half = source + i + j * (LINE / 2);
      if (ahead && j % 2 == 0) _mm_prefetch(half + ahead, _MM_HINT_T0);
      sums[j] = _mm256_add_epi64(sums[j], _mm256_load_si256((const __m256i*)half));
    }
  }
  uint64_t words[4], sum = 0;
  for (int j = 1; j < 8; j++) sums[0] = _mm256_add_epi64(sums[0], sums[j]);
  _mm256_storeu_si256((__m256i*)words, sums[0]);
  for (int j = 0; j < 4; j++) sum += words[j];
  return sum;
}

TARGET("avx2") uint64_t read_avx2(char* target, const char* source, size_t bytes) {
  (void)target;
  return read_256(source, bytes, 0);
}

TARGET("avx2") uint64_t read_prefetch_avx2(char* target, const char* source, size_t bytes) {
  (void)target;
  return read_256(source, bytes, AHEAD);
}

TARGET("avx2") uint64_t write_stream_avx2(char* target, const char* source, size_t bytes) {
  (void)source;
  const __m256i ones = _mm256_set1_epi8(1);
  for (size_t i = 0; i < bytes; i += LINE / 2) {
    _mm256_stream_si256((__m256i*)(target + i), ones);
  }
  _mm_sfence();
  return 0;
}

TARGET("avx2") uint64_t copy_stream_avx2(char* target, const char* source, size_t bytes) {
  for (size_t i = 0; i < bytes; i += STEP) {
    __m256i halves[8];
    for (int j = 0; j < 8; j++) {
      halves[j] = _mm256_load_si256((const __m256i*)(source + i + j * (LINE / 2)));
    }
    for (int j = 0; j < 8; j++) {
      _mm256_stream_si256((__m256i*)(target + i + j * (LINE / 2)), halves[j]);
    }
  }
  _mm_sfence();
  return 0;
}

#endif

enum { PORTABLE, AVX2, AVX512, NUM_ISAS };

static const body bodies[NUM_ISAS][NUM_KINDS] = {
#if defined(__x86_64__)
    [AVX512] = {read_avx512, read_prefetch_avx512, write_portable, write_stream_avx512, copy_memcpy,
                copy_stream_avx512, fill},
    [AVX2] = {read_avx2, read_prefetch_avx2, write_portable, write_stream_avx2, copy_memcpy,
              copy_stream_avx2, fill},
#endif
    [PORTABLE] = {read_portable, read_prefetch_portable, write_portable, write_portable,
                  copy_memcpy, copy_memcpy, fill},
};

// The widest vectors that this processor has: 2 AVX-512, 1 AVX2, 0 neither.
int ceilings_best_isa(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return AVX512;
  if (__builtin_cpu_supports("avx2")) return AVX2;
#endif
  return PORTABLE;
}

struct job {
  body run;
  char* target;
  const char* source;
  size_t bytes, piece, first;     // `first`: the piece to begin with; the pass comes round to it
  const _Atomic int32_t* stop;    // null: one pass; else pass after pass until it is not 0
  _Atomic uint64_t* bytes_done;   // null: nobody watches
  _Atomic size_t next;
  // The gate before the first piece: opened when all threads stand before it.
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  int waiting, is_open, is_cancelled;
};

struct worker {
  struct job* job;
  uint64_t sum;
  double begin, end;
};

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int pass_gate(struct job* job) {
  pthread_mutex_lock(&job->mutex);
  job->waiting++;
  pthread_cond_broadcast(&job->changed);
  while (!job->is_open) pthread_cond_wait(&job->changed, &job->mutex);
  pthread_mutex_unlock(&job->mutex);
  return !job->is_cancelled;
}

static void open_gate(struct job* job, int threads, int cancel) {
  pthread_mutex_lock(&job->mutex);
  while (job->waiting < threads) pthread_cond_wait(&job->changed, &job->mutex);
  job->is_cancelled = cancel;
  job->is_open = 1;
  pthread_cond_broadcast(&job->changed);
  pthread_mutex_unlock(&job->mutex);
}

static void* work(void* argument) {
  struct worker* self = argument;
  struct job* job = self->job;
  const size_t count = (job->bytes + job->piece - 1) / job->piece;
  if (!pass_gate(job)) return NULL;
  self->begin = now();
  for (;;) {
    const size_t index = atomic_fetch_add(&job->next, 1);
    if (job->stop ? atomic_load(job->stop) : index >= count) break;
    const size_t offset = (job->first + index) % count * job->piece;
    const size_t left = job->bytes - offset;
    const size_t bytes = left < job->piece ? left : job->piece;
    self->sum += job->run(job->target + offset, job->source + offset, bytes);
    if (job->bytes_done) atomic_fetch_add(job->bytes_done, bytes);
    // Under a real-time priority nothing else would run here until the end, which must be told.
    if (job->stop) sched_yield();
  }
  self->end = now();
  return NULL;
}

static int start(struct worker* worker, int cpu, pthread_t* thread) {
  pthread_attr_t attributes;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_attr_init(&attributes);
  int failed = pthread_attr_setaffinity_np(&attributes, sizeof set, &set);
  if (!failed) failed = pthread_create(thread, &attributes, work, worker);
  pthread_attr_destroy(&attributes);
  return failed;
}

// Seconds of one pass of `threads` threads over `bytes`, from piece number `first` round to it,
// thread i on processor cpus[i]; with `stop`, passes until it is set. Negative: a thread could not
// be started, and nothing was done.
double ceilings_run(int kind, int isa, char* target, const char* source, size_t bytes, size_t piece,
                    size_t first, const int32_t* cpus, int threads, const int32_t* stop,
                    uint64_t* bytes_done, uint64_t* sum) {
  enum { MOST = 1024 };
  static _Thread_local struct worker workers[MOST];
  static _Thread_local pthread_t ids[MOST];
  if (threads < 1 || threads > MOST || !bodies[isa][kind]) return -1.0;
  struct job job = {.run = bodies[isa][kind],
                    .target = target,
                    .source = source,
                    .bytes = bytes,
                    .piece = piece,
                    .first = first,
                    .stop = (const _Atomic int32_t*)stop,
                    .bytes_done = (_Atomic uint64_t*)bytes_done,
                    .mutex = PTHREAD_MUTEX_INITIALIZER,
                    .changed = PTHREAD_COND_INITIALIZER};
  int started = 0;
  for (; started < threads; started++) {
    workers[started] = (struct worker){.job = &job};
    if (start(&workers[started], cpus[started], &ids[started])) break;
  }
  open_gate(&job, started, started < threads);
  for (int i = 0; i < started; i++) pthread_join(ids[i], NULL);
  if (started < threads) return -1.0;
  double begin = workers[0].begin, end = workers[0].end;
  *sum = 0;
  for (int i = 0; i < threads; i++) {
    begin = workers[i].begin < begin ? workers[i].begin : begin;
    end = workers[i].end > end ? workers[i].end : end;
    *sum += workers[i].sum;
  }
  return end - begin;
}
