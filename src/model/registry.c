/* model/registry.c - the architectures we have. A new one is a file and a line here. */
#include "model/arch.h"

#include <string.h>

static const bg_arch *const archs[] = {&bg_arch_llama,     &bg_arch_qwen2,    &bg_arch_qwen3,
                                       &bg_arch_gemma3,    &bg_arch_qwen2moe, &bg_arch_qwen3moe,
                                       &bg_arch_glm4,      &bg_arch_glm4moe,  &bg_arch_gpt_oss,
                                       &bg_arch_deepseek2, &bg_arch_glm_dsa};

static const char *const names[] = {"llama",    "qwen2",     "qwen3",   "gemma3",
                                    "qwen2moe", "qwen3moe",  "glm4",    "glm4moe",
                                    "gpt-oss",  "deepseek2", "glm-dsa", NULL};

_Static_assert(sizeof names / sizeof *names == sizeof archs / sizeof *archs + 1,
               "one name for each architecture");

const bg_arch *bg_arch_find(const char *name, size_t n)
{
    for (size_t i = 0; i < sizeof archs / sizeof *archs; i++)
        if (strlen(archs[i]->name) == n && memcmp(archs[i]->name, name, n) == 0) return archs[i];
    return NULL;
}

const char *const *bg_arch_names(void)
{
    return names;
}
