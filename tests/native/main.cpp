// Small tests of the native library, its threads above all, for builds with sanitizers.
#include <unistd.h>

#include "checks.h"

int main() {
  alarm(300);  // a job that never ends is a failure too; all this takes seconds
  test_plan();
  test_cores();
  test_loops();
  test_jobs();
  test_attention();
  test_gather();
  std::puts("native tests passed");
}
