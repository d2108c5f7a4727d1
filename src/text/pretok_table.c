/* The pre-tokenisers: for each `tokenizer.ggml.pre` its regexes and what else goes with the name.
 *
 * The regexes are the published ones, in some places in another form with the same matches, which
 * needs steps in proportion to the text where the original is quadratic or fills PCRE2's stack:
 *   kimi_k2       set intersections are negated classes: "Lu Lt Lm Lo M but not Han" is all that is
 *                 not C, Ll, N, P, S, Z or Han. Han is the script, not PCRE2's script extensions.
 *   deepseek_llm  \s+$ may only begin where a run of spaces begins
 *   jais_2        \s*[\r\n]+ is not tried again inside a run of spaces where it failed
 *   exaone_moe    the nested repeats of letters and marks are flat and possessive
 *   superbpe      (?=(\d{3})+(?!\d)) and
 *   tiny_aya      \d{1,3}(?=(?:\d{3})*\b) find runs of digits, and pretok.c cuts them in threes; so
 *   afmoe         does its own rule for digits. */
#include "text/pretok.h"

#include <string.h>

#define GPT2          "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)"
#define CONTRACTION   "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
#define CONTRACTION_I "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define UPPER         "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER         "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define UPPER_NOT_HAN "[^\\p{C}\\p{Ll}\\p{N}\\p{P}\\p{S}\\p{Z}\\p{sc:Han}]"
#define LOWER_NOT_HAN "[^\\p{C}\\p{Lu}\\p{Lt}\\p{N}\\p{P}\\p{S}\\p{Z}\\p{sc:Han}]"
#define LEAD          "[^\\r\\n\\p{L}\\p{N}]?"
#define LINE_ENDS     "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define MARKS         " ?[^\\s\\p{L}\\p{N}]+"
#define ASCII_MARK    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~]"
#define KANA_HAN      "[\\u4E00-\\u9FA5\\u3040-\\u309F\\u30A0-\\u30FF]"
#define NOT_PUNCT     " ?[^(\\s|.,!?\\u2026\\u3002\\uFF0C\\u3001\\u0964\\u06D4\\u060C)]+"

static const bg_pretok_stage gpt2[] = {
    {GPT2, BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage llama3[] = {
    {CONTRACTION "|" LEAD "\\p{L}+|\\p{N}{1,3}|" MARKS "[\\r\\n]*" LINE_ENDS, BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage qwen2[] = {
    {CONTRACTION "|" LEAD "\\p{L}+|\\p{N}|" MARKS "[\\r\\n]*" LINE_ENDS, BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage qwen35[] = {
    {CONTRACTION "|" LEAD "[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*" LINE_ENDS,
     BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage digits_gpt2[] = {
    {"\\p{N}", BG_CUT_MATCH},
    {GPT2, BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage falcon[] = {
    {"[\\p{P}\\$\\+<=>\\^~\\|`]+", BG_CUT_MATCH},
    {GPT2, BG_CUT_MATCH},
    {"[0-9][0-9][0-9]", BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage plain[] = {
    {"[\\p{P}\\$\\+<=>\\^~\\|]+", BG_CUT_MATCH}, {GPT2, BG_CUT_MATCH}, {"\\p{N}+", BG_CUT_MATCH},
    {"[0-9][0-9][0-9]", BG_CUT_MATCH},           {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage deepseek_v3[] = {
    {"\\p{N}{1,3}", BG_CUT_MATCH},
    {KANA_HAN "+", BG_CUT_MATCH},
    {ASCII_MARK
     "[A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*" LINE_ENDS,
     BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage deepseek_llm[] = {
    {"[\\r\\n]", BG_CUT_MATCH},
    {"\\s?[A-Za-z\\u00B5\\u00C0-\\u00D6\\u00D8-\\u00F6\\u00F8-\\u01BA\\u01BC-\\u01BF\\u01C4-"
     "\\u0293\\u0295-\\u02AF\\u0370-\\u0373\\u0376\\u0377\\u037B-\\u037D\\u037F\\u0386\\u0388-"
     "\\u038A\\u038C\\u038E-\\u03A1\\u03A3-\\u03F5\\u03F7-\\u0481\\u048A-\\u052F\\u0531-"
     "\\u0556\\u10A0-\\u10C5\\u13A0-\\u13F5\\u13F8-\\u13FD\\u1C90-\\u1CBA\\u1CBD-\\u1CBF\\u1D00-"
     "\\u1D2B\\u1D6B-\\u1D77\\u1D79-\\u1D9A\\u1E00-\\u1F15\\u1F18-\\u1F1D\\u1F20-\\u1F45\\u1F48-"
     "\\u1F4D\\u1F50-\\u1F57\\u1F59\\u1F5B\\u1F5D\\u1F5F-\\u1F7D\\u1F80-\\u1FB4\\u1FB6-"
     "\\u1FBC\\u1FBE\\u1FC2-\\u1FC4\\u1FC6-\\u1FCC\\u1FD0-\\u1FD3\\u1FD6-\\u1FDB\\u1FE0-"
     "\\u1FEC\\u1FF2-\\u1FF4\\u1FF6-\\u1FFC\\u2102\\u2107\\u210A-\\u2113\\u2115\\u2119-"
     "\\u211D\\u2124\\u2126\\u2128\\u212A-\\u212D\\u212F-\\u2134\\u2139\\u213C-\\u213F\\u2145-"
     "\\u2149\\u214E\\u2183\\u2184\\u2C00-\\u2C7B\\u2C7E-\\u2CE4\\u2CEB-"
     "\\u2CEE\\u2CF2\\u2CF3\\uA640-\\uA66D\\uA680-\\uA69B\\uA722-\\uA76F\\uA771-\\uA787\\uA78B-"
     "\\uA78E\\uAB70-\\uABBF\\uFB00-\\uFB06\\uFB13-\\uFB17\\uFF21-\\uFF3A\\uFF41-"
     "\\uFF5A\\U00010400-\\U0001044F\\U000104B0-\\U000104D3\\U000104D8-\\U000104FB\\U00010C80-"
     "\\U00010CB2\\U00010CC0-\\U00010CF2\\U000118A0-\\U000118DF\\U0001E900-\\U0001E943]+",
     BG_CUT_MATCH},
    {"\\s?[!-/:-~\\uFF01-\\uFF0F\\uFF1A-\\uFF5E\\u2018-\\u201F\\u3000-\\u3002]+", BG_CUT_MATCH},
    {"(?<!\\s)\\s+\\z", BG_CUT_MATCH},
    {"[\\u4E00-\\u9FA5\\u0800-\\u4E00\\uAC00-\\uD7FF]+", BG_CUT_MATCH},
    {"\\p{N}+", BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage deepseek_coder[] = {
    {"[\\r\\n]", BG_CUT_MATCH},
    {"\\s?\\p{L}+", BG_CUT_MATCH},
    {"\\s?\\p{P}+", BG_CUT_MATCH},
    {"[\\u4E00-\\u9FA5\\u0800-\\u4E00\\uAC00-\\uD7FF]+", BG_CUT_MATCH},
    {"\\p{N}", BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage bloom[] = {
    {NOT_PUNCT, BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage viking[] = {
    {NOT_PUNCT, BG_CUT_MATCH},
    {"\\p{N}", BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage bailingmoe[] = {
    {"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|" LEAD "\\p{L}+|\\p{N}|" MARKS
     "[\\r\\n]*|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+",
     BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage seed_coder[] = {
    {CONTRACTION "|" LEAD "\\p{L}+|\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\\r\\n]+" LINE_ENDS, BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage superbpe[] = {
    {"\\p{N}+", BG_CUT_MATCH},
    {"\\d+", BG_CUT_THIRDS_INSIDE},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage minicpm5[] = {
    {"\\p{N}{1,3}", BG_CUT_MATCH},
    {CONTRACTION "|" LEAD "\\p{L}+|\\p{N}+|" MARKS "[\\r\\n]*" LINE_ENDS, BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage laguna[] = {
    {"[^\\n]+|[\\n]+", BG_CUT_MATCH},
    {CONTRACTION "|" LEAD "\\p{L}+|\\p{N}|" MARKS "[\\r\\n]*" LINE_ENDS, BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage exaone_moe[] = {
    {CONTRACTION "|" LEAD "\\p{L}[\\p{L}\\p{M}]*+(?: \\p{L}[\\p{L}\\p{M}]*+)*+|\\p{N}|" MARKS
                 "[\\r\\n/]?|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+",
     BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage youtu[] = {
    {"[\\uAC00-\\uD7A3\\u3131-\\u318E]+|["
     "\\uFF01\\u2026\\u201C\\u201D\\u2018\\u2019\\u2014\\uFF1A\\uFF1B\\uFF0C\\u3001-\\u303F\\uFE30-"
     "\\uFE4F]+|[\\u3105-\\u312F]+|" KANA_HAN "+",
     BG_CUT_MATCH},
    {LEAD UPPER "*" LOWER "+" CONTRACTION "?|" LEAD UPPER "+" LOWER "*" CONTRACTION
                "?|\\p{N}|" MARKS "[\\r\\n/]*" LINE_ENDS,
     BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage jais_2[] = {
    {CONTRACTION "|" LEAD "\\p{L}+|\\p{N}{1,3}|" MARKS
                 "[\\r\\n]*|(?:(?<!\\s)|(?<=[\\r\\n]))\\s*[\\r\\n]+|\\s{512}(?!\\S)|\\s{256}(?!\\S)"
                 "|\\s{128}(?!\\S)|\\s{64}(?!\\S)|\\s{"
                 "32}(?!\\S)|\\s{16}(?!\\S)|\\s{8}(?!\\S)|\\s{4}(?!\\S)|\\s{1,2}(?!\\S)|\\s{1}",
     BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage chameleon[] = {
    {"<sentinel:[0-9]+>", BG_CUT_MATCH},
    {"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", BG_CUT_MATCH},
    {"([\\t\\n]|    |  )", BG_CUT_MATCH},
    {"\\p{N}", BG_CUT_MATCH},
    {"[\\p{P}!-/:-@\\[-`{-~]", BG_CUT_MATCH},
    {GPT2, BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage newline_runs[] = {
    {"[^\\n]+|[\\n]+", BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage not_spaces[] = {
    {"\\S+", BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage afmoe[] = {
    {"\\p{N}+", BG_CUT_THIRDS},
    {"[\\u4E00-\\u9FFF\\u3400-\\u4DBF\\u8C48-\\uFAFF\\u3040-\\u309F\\u30A0-\\u30FF\\uFF65-"
     "\\uFF9F\\u2F00-\\u2FDF\\u0E40-\\u0E7F\\u0E80-\\u0EFF\\u1780-\\u17FF\\u1000-\\u109F\\uAA60-"
     "\\uAA7F\\uA9E0-\\uA9FF\\uAC00-\\uD7AF\\u1100-\\u11FF]+",
     BG_CUT_MATCH},
    {ASCII_MARK
     "[A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*" LINE_ENDS,
     BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage gpt_4o[] = {
    {LEAD UPPER "*" LOWER "+" CONTRACTION_I "?|" LEAD UPPER "+" LOWER "*" CONTRACTION_I
                "?|\\p{N}{1,3}|" MARKS "[\\r\\n/]*" LINE_ENDS,
     BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage tekken[] = {
    {LEAD UPPER "*" LOWER "+|" LEAD UPPER "+" LOWER "*|\\p{N}|" MARKS "[\\r\\n/]*" LINE_ENDS,
     BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage kimi_k2[] = {
    {"\\p{sc:Han}+|" LEAD UPPER_NOT_HAN "*" LOWER_NOT_HAN "+" CONTRACTION_I "?|" LEAD UPPER_NOT_HAN
     "+" LOWER_NOT_HAN "*" CONTRACTION_I "?|\\p{N}{1,3}|" MARKS "[\\r\\n]*" LINE_ENDS,
     BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage tiny_aya[] = {
    {"(?<!\\d)\\d++(?![\\p{L}\\p{M}\\p{N}\\p{Pc}])", BG_CUT_THIRDS},
    {LEAD UPPER "*" LOWER "+" CONTRACTION_I "?|" LEAD UPPER "+" LOWER "*" CONTRACTION_I
                "?|\\p{N}{1,3}|" MARKS "[\\r\\n/]*" LINE_ENDS,
     BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage spark2_5[] = {
    {"\\p{N}{1,3}", BG_CUT_MATCH},
    {KANA_HAN "+", BG_CUT_MATCH},
    {ASCII_MARK "[A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| "
                "?[\\p{P}\\p{S}]+|[\\r\\n]|\\s+(?!\\S)|\\s+",
     BG_CUT_MATCH},
    {"\\p{N}", BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};
static const bg_pretok_stage ufakzeka[] = {
    {LEAD "\\p{L}+|\\p{N}|" MARKS "[\\r\\n]*" LINE_ENDS, BG_CUT_MATCH},
    {NULL, BG_CUT_MATCH},
};

/* name, regexes, ignore_merges, add_bos, raw, blocks */
static const bg_pre table[] = {
    {"default", plain, false, false, false, false},
    {"llama-bpe", llama3, true, true, false, false},
    {"llama3", llama3, true, true, false, false},
    {"llama-v3", llama3, true, true, false, false},
    {"falcon3", llama3, true, true, false, false},
    {"falcon-h1", llama3, true, true, false, false},
    {"pixtral", llama3, true, true, false, false},
    {"midm-2.0", llama3, true, true, false, false},
    {"lfm2", llama3, true, true, false, false},
    {"jina-v5-nano", llama3, true, true, false, false},
    {"dbrx", llama3, false, false, false, false},
    {"smaug-bpe", llama3, false, false, false, false},
    {"glm4", llama3, false, false, false, false},
    {"chatglm-bpe", llama3, false, false, false, false},
    {"qwen2", qwen2, false, false, false, false},
    {"deepseek-r1-qwen", qwen2, false, false, false, false},
    {"kormo", qwen2, false, false, false, false},
    {"f2llmv2", qwen2, false, false, false, false},
    {"hunyuan", qwen2, false, false, false, false},
    {"solar-open", qwen2, false, false, false, false},
    {"grok-2", qwen2, false, false, false, false},
    {"megrez", qwen2, false, false, false, false},
    {"stablelm2", qwen2, false, false, false, false},
    {"qwen35", qwen35, false, false, false, false},
    {"deepseek-v3", deepseek_v3, false, false, false, false},
    {"hunyuan-dense", deepseek_v3, false, false, false, false},
    {"joyai-llm", deepseek_v3, false, false, false, false},
    {"hy_v4", deepseek_v3, false, false, false, false},
    {"deepseek-llm", deepseek_llm, false, false, false, false},
    {"deepseek-coder", deepseek_coder, false, false, false, false},
    {"gpt-2", gpt2, false, false, false, false},
    {"phi-2", gpt2, false, false, false, false},
    {"jina-es", gpt2, false, false, false, false},
    {"jina-de", gpt2, false, false, false, false},
    {"gigachat", gpt2, false, false, false, false},
    {"jina-v2-es", gpt2, false, false, false, false},
    {"jina-v2-de", gpt2, false, false, false, false},
    {"a.x-4.0", gpt2, false, false, false, false},
    {"mellum", gpt2, false, false, false, false},
    {"modern-bert", gpt2, false, false, false, false},
    {"mpt", gpt2, false, false, false, false},
    {"olmo", gpt2, false, false, false, false},
    {"jais", gpt2, false, false, false, false},
    {"exaone4", gpt2, false, false, false, false},
    {"jina-v1-en", gpt2, false, false, false, false},
    {"jina-v2-code", gpt2, false, false, false, false},
    {"roberta-bpe", gpt2, false, false, false, false},
    {"trillion", gpt2, false, false, false, false},
    {"granite-docling", gpt2, false, false, false, false},
    {"smollm", digits_gpt2, false, false, false, false},
    {"command-r", digits_gpt2, false, false, false, false},
    {"starcoder", digits_gpt2, false, false, false, false},
    {"refact", digits_gpt2, false, false, false, false},
    {"codeshell", digits_gpt2, false, false, false, false},
    {"exaone", digits_gpt2, false, false, false, false},
    {"minerva-7b", digits_gpt2, false, false, false, false},
    {"mellum2", digits_gpt2, false, false, false, false},
    {"falcon", falcon, false, false, false, false},
    {"gpt-4o", gpt_4o, false, false, false, false},
    {"llama4", gpt_4o, false, false, false, false},
    {"kanana2", gpt_4o, false, false, false, false},
    {"talkie", gpt_4o, false, false, false, false},
    {"minimax-m2", gpt_4o, false, false, false, false},
    {"granite-embed-multi-97m", gpt_4o, true, false, false, false},
    {"tekken", tekken, true, true, false, false},
    {"kimi-k2", kimi_k2, false, false, false, false},
    {"tiny_aya", tiny_aya, false, false, false, false},
    {"cohere2moe", tiny_aya, false, false, false, false},
    {"superbpe", superbpe, false, false, false, false},
    {"bailingmoe", bailingmoe, false, false, false, false},
    {"bailingmoe2", bailingmoe, false, false, false, false},
    {"llada-moe", bailingmoe, false, false, false, false},
    {"seed-coder", seed_coder, false, false, false, false},
    {"minicpm5", minicpm5, true, false, false, false},
    {"laguna", laguna, false, false, false, false},
    {"afmoe", afmoe, false, false, false, false},
    {"exaone-moe", exaone_moe, false, false, false, false},
    {"youtu", youtu, true, false, false, false},
    {"jais-2", jais_2, false, false, false, false},
    {"chameleon", chameleon, false, true, false, false},
    {"poro-chat", bloom, false, false, false, false},
    {"bloom", bloom, false, false, false, false},
    {"gpt3-finnish", bloom, false, false, false, false},
    {"viking", viking, false, false, false, false},
    {"gemma4", newline_runs, false, true, true, true},
    {"granite-embed-multi-311m", newline_runs, false, true, true, true},
    {"sarvam-moe", newline_runs, false, false, true, true},
    {"whitespace", not_spaces, false, false, true, false},
    {"spark2_5", spark2_5, false, false, false, false},
    {"ufakzeka", ufakzeka, false, false, false, false},
};

const bg_pre *bg_pre_at(size_t i)
{
    return i < sizeof table / sizeof table[0] ? &table[i] : NULL;
}

const bg_pre *bg_pre_find(const char *name, size_t n)
{
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (strlen(table[i].name) == n && memcmp(table[i].name, name, n) == 0) return &table[i];
    return NULL;
}
