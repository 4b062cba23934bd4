// Every scene, of a few tokens, or of enough that host calls share them out over threads.
#pragma once
#include <memory>
#include <vector>

#include "scene.h"

namespace fuzz {

struct Sizes {
  int64_t blocks, block_size, heads, dim, tokens, seqs, columns, longest;
};
constexpr Sizes kSmall{5, 4, 2, 8, 6, 3, 2, 7}, kLarge{64, 16, 4, 64, 640, 8, 6, 90};

using Scenes = std::vector<std::unique_ptr<Scene>>;

void add_cache_scenes(const Sizes& z, Scenes* out);   // v1.2: write, gather, amax, attention, append, merge, copies
void add_hybrid_scenes(const Sizes& z, Scenes* out);  // rows in pages
void add_plan_scenes(const Sizes& z, Scenes* out);    // plans, conversions, digests
void add_other_scenes(const Sizes& z, Scenes* out);   // v1.1, names of blocks, versions, Dynamo's calls

}  // namespace fuzz
