// What is assumed of values that nobody computed, besides what
// lowtide/phantom/dry/values.py sees itself.
#pragma once

namespace lowtide::dry {

// Tells the listener of this sentence, on this thread.
void assume(const char* what);

}  // namespace lowtide::dry
