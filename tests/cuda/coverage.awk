# Lines that ran, from what `gcov -m` writes of the CUDA unit: device code (functions that say __global__ or __device__)
# and host code apart, and of the device's templates how many of their instances ran at all. One row a file, then the
# total. The status is 1 when less than `least` percent of the device's lines, or of its instances, ran; -v list=1
# prints those that did not.
#
#   awk -v least=95 -f coverage.awk *.cu.gcov *.cuh.gcov

function braces(text) {
    gsub(/'.'|"[^"]*"/, "", text)
    return gsub(/{/, "{", text) - gsub(/}/, "}", text)
}

# Whether a line of source is device code: from the word to the end of the body that follows it.
function on_device(text,    was) {
    if (!inside && text ~ /__global__|__device__/) {
        inside = 1
        outer = depth
        opened = 0
    }
    if (text ~ /{/) opened = 1
    depth += braces(text)
    was = inside
    if (inside && (opened ? depth <= outer : text ~ /;[ ]*$/)) inside = 0
    return was
}

function note(count, side) {
    kind[file, line] = side
    if (count !~ /^[#=]/) ran[file, line] = 1
    if (!instance || side != "device") return
    if (!((file, instance) in instances)) instances[file, instance] = 0
    if (count !~ /^[#=]/) instances[file, instance] = 1
}

FNR == 1 {
    file = FILENAME
    sub(/\.gcov$/, "", file)
    files[++file_count] = file
    highest = depth = inside = 0
    instance = ""
}

# Behind the lines of a template they come again for each instance, under its name.
/^-+$/ {
    instance = ""
    next
}
/:$/ && !/^ *[-0-9#=*]+:/ {
    instance = $0
    next
}

/^ *[-0-9#=*]+:/ {
    count = $0
    sub(/:.*/, "", count)
    gsub(/ /, "", count)
    text = substr($0, index($0, ":") + 1)
    line = text + 0
    text = substr(text, index(text, ":") + 1)
    if (line == 0) next
    if (line > highest) {
        highest = line
        device[file, line] = on_device(text)
        source[file, line] = text
    }
    if (count != "-") note(count, device[file, line] ? "device" : "host")
}

function percent(part, whole) {
    return whole ? sprintf("%5.1f %%", 100 * part / whole) : "      -"
}

function row(name, side) {
    printf "%-18s device %4d of %4d lines %s, %3d of %3d instances; host %4d of %4d lines %s\n", name,
        covered[side, "device"], lines[side, "device"], percent(covered[side, "device"], lines[side, "device"]),
        covered[side, "instance"], lines[side, "instance"], covered[side, "host"], lines[side, "host"],
        percent(covered[side, "host"], lines[side, "host"])
}

function add(name, what, has_run) {
    lines[name, what]++
    lines["total", what]++
    covered[name, what] += has_run
    covered["total", what] += has_run
}

END {
    for (key in kind) {
        split(key, part, SUBSEP)
        add(part[1], kind[key], key in ran)
        if (list && !(key in ran))
            printf "%s:%d: %s:%s\n", part[1], part[2], kind[key], source[key] | "sort -t: -k1,1 -k2,2n"
    }
    for (key in instances) {
        split(key, part, SUBSEP)
        add(part[1], "instance", instances[key])
        if (list && !instances[key]) printf "%s: never: %s\n", part[1], part[2] | "sort"
    }
    if (list) {
        close("sort -t: -k1,1 -k2,2n")
        close("sort")
    }
    for (i = 1; i <= file_count; i++) row(files[i], files[i])
    row("total", "total")
    low = 100 * covered["total", "device"] < least * lines["total", "device"] ||
          100 * covered["total", "instance"] < least * lines["total", "instance"]
    exit low || !lines["total", "device"]
}
