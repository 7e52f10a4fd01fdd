# Of a PTX file, "function <tab> fused <tab> loose" for every function: multiply-adds that nobody wrote, and products and sums
# that may be joined to one, because they are not marked .rn. What is meant stands in inline assembly.
/^\.(visible |weak |extern )*\.?(entry|func)/ || /\.(entry|func) / {
    line = $0
    sub(/\(\.param[^)]*\)/, "", line)
    sub(/.*\.(entry|func)[ \t]*/, "", line)
    sub(/[^A-Za-z0-9_$].*/, "", line)
    sub(/^__nv_static_[A-Za-z0-9_]*__Z/, "_Z", line) # what -rdc makes of static names
    name = line
}
/^{/ { if (name != "") seen[name] = 1 }
/begin inline asm/ { meant = 1 }
/end inline asm/ { meant = 0 }
meant { next }
/[ \t]fma\.[a-z.]*f(32|64)/ { fused[name]++ }
/[ \t](mul|add|sub)\.(ftz\.)?(sat\.)?f(32|64)/ { loose[name]++ }
END { for (name in seen) printf "%s\t%d\t%d\n", name, fused[name], loose[name] }
