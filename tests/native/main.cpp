// Small tests of the threads of the native library, for builds with sanitizers.
#include <unistd.h>

#include "checks.h"

int main() {
  alarm(300);  // a job that never ends is a failure too; all this takes seconds
  test_loops();
  test_jobs();
  test_attention();
  std::puts("native tests passed");
}
