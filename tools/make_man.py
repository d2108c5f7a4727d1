#!/usr/bin/env python3
"""Writes tools/batchgen.1 from the help texts of build/batchgen: make && tools/make_man.py"""
import subprocess,re
cmds=[("run","generate for every line; resumes what was started"),("check","list all bad lines, count tokens"),("inspect","show a model's metadata, tensors, memory and TP plan"),("bench","measure prefill and decode rates"),("tokenize","text to token ids"),("render","messages to prompt text"),("status","how far a job is, by its output and journal; never disturbs a run"),("cat","verified results as text, also of a running job; FILE is compressed by its name"),("merge","the outputs of all shards of a job as one, with a journal"),("repair","rebuild a lost or damaged journal from the output, and its error file if it has one")]
def esc(s): return s.replace("\\","\\e").replace("-","\\-")
o=['.TH BATCHGEN 1 "2026-11-29" "batchgen 0.1.0" "User Commands"','.SH NAME','batchgen \\- offline batch generation with GGUF language models','.SH SYNOPSIS',
'.B batchgen run','.I INPUT...','.B \\-o','.I OUTPUT','.B \\-m','.I MODEL','[options]','.br','.B batchgen','.RI check|inspect|bench|tokenize|render|status|cat|merge|repair " ...\\&"',
'.SH DESCRIPTION','Reads prompts as JSON lines, generates for all of them with a GGUF model, and appends results to an LZ4 file that can be read at any moment.','After any stop, kill or crash the same command goes on where it was; no line is lost or written twice.',
'.PP','Every option of','.B run','can stand in the environment','(\\fB\\-\\-max\\-num\\-seqs\\fR is \\fBBATCHGEN_MAX_NUM_SEQS\\fR), in a job file, or in the user\\(aqs config file; flag > environment > job file > config file.']
for c,h in cmds:
    out=subprocess.run(["build/batchgen",c,"--help"],capture_output=True,text=True).stdout
    o+=[f'.SH "OPTIONS OF {c.upper()}"', esc(h)[0].upper()+esc(h)[1:]+"."]
    for l in out.splitlines():
        m=re.match(r"^  (-.,| {3}) (--\S+(?: \S+)?)\s+(.*)$",l)
        if m:
            s=(m.group(1).strip()+" "+m.group(2)).strip()
            o+=['.TP','.B '+esc(s),esc(m.group(3))]
o+=['.SH MODELS','GGUF files, also split ones (any part opens them all), of these architectures:','.TP','.B llama','Llama 2 and 3, Mistral, SmolLM2; with experts: Mixtral.','.TP','.B qwen2, qwen3, gemma3, glm4','Qwen 2, 2.5 and 3, Gemma 3, GLM\\-4\\-0414; dense.','.TP','.B qwen2moe, qwen3moe, glm4moe, gpt\\-oss','With experts.','.TP','.B deepseek2','DeepSeek V2, V3, R1, Kimi\\-K2, GLM\\-4.7\\-Flash: experts and latent attention.','.TP','.B glm\\-dsa','GLM\\-5: the same with an indexer that chooses keys.',
'.PP','Each rank of','.B \\-\\-tp','has a part of every expert: what tokens choose does not change how the work is shared. With latent attention every rank has the keys and values of all heads, one row a token and layer. Blocks that predict further tokens are skipped.',
'.PP','.B batchgen inspect','MODEL','.B \\-\\-tp','N','.B \\-\\-device\\-memory','SIZE says who holds what, how many tokens fit beside the weights, and what a step reads and computes at least. With','.B \\-\\-load\\-format dummy','the file may end after its header.']
o+=['.SH FILES','.TP','.I OUTPUT','LZ4 frames of whole JSON lines when the name ends in .lz4, else plain text.','.TP','.I OUTPUT.journal','The job\\(aqs identity and one checksummed line a commit.','.TP','.I $XDG_CONFIG_HOME/batchgen/config.json','The user\\(aqs defaults.',
'.SH "EXIT STATUS"']
for a,b in [("0","All records done, none failed."),("1","All records done, some have error results."),("64","Usage, or the output belongs to another job."),("65","Bad data."),("66","No input."),("69","A worker process failed for good."),("70","Out of memory, or a bug."),("73","The output cannot be created."),("74","I/O error, disk full."),("75","Not finished: start again to go on. Also when another run holds the lock."),("78","Bad configuration or model.")]:
    o+=['.TP','.B '+a,b]
o+=['.SH SIGNALS','The first SIGTERM, SIGINT or SIGUSR1 stops in order, the second SIGINT or SIGTERM at once; SIGQUIT prints the state; SIGHUP reopens the log file.','.SH EXAMPLES','.nf','batchgen run prompts.jsonl \\-o out.jsonl.lz4 \\-m model.gguf','lz4 \\-dc out.jsonl.lz4 | head','batchgen status out.jsonl.lz4','batchgen cat out.jsonl.lz4 \\-\\-ordered \\-o out.jsonl.gz','batchgen merge out.1of2.lz4 out.2of2.lz4 \\-o out.lz4','batchgen check prompts.jsonl.zst \\-m model.gguf','.fi','.SH "SEE ALSO"','.BR lz4 (1)']
open("tools/batchgen.1","w").write("\n".join(o)+"\n")
