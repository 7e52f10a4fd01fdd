/* Names of kernels and source lines, for reports: from addr2line, looked up once. */
#include "emu.h"

#include <dlfcn.h>

namespace emu {

/* Lines of `addr2line OPTIONS` for an address of this program: the function's name with -f, then
 * file:line. */
static std::string look_up(const char *options, const void *address, size_t back) {
    static std::map<std::pair<std::string, const void *>, std::string> known;
    char text[1000];
    Dl_info information;
    const auto key = std::make_pair(std::string(options), address);
    if (known.count(key)) return known[key];
    if (!dladdr(address, &information)) return "";
    const size_t offset =
        (size_t)(static_cast<const char *>(address) - static_cast<const char *>(information.dli_fbase)) -
        back;
    snprintf(text, sizeof text, "addr2line %s -e %s 0x%zx 2>/dev/null", options, information.dli_fname,
             offset);
    std::string found;
    FILE *pipe = popen(text, "r");
    if (pipe && fgets(text, sizeof text, pipe) && text[0] != '?') found.assign(text, strcspn(text, "\n"));
    if (pipe) pclose(pipe);
    if (found.empty()) {
        snprintf(text, sizeof text, "code at +0x%zx", offset);
        found = text;
    }
    return known[key] = found;
}

/* Without parameters and return type. */
std::string kernel_name(const void *kernel) {
    Lock lock(big_lock);
    std::string name = look_up("-f -C", kernel, 0);
    const size_t parameters = name.find('(');
    if (parameters != std::string::npos && parameters > 0) name.erase(parameters);
    if (name.compare(0, 5, "void ") == 0) name.erase(0, 5);
    return name;
}

/* The mangled names in a file by address. All at once: a question to addr2line takes a tenth of a second. */
static const std::map<size_t, std::string> &symbols_of(const std::string &file) {
    static std::map<std::string, std::map<size_t, std::string>> known;
    if (known.count(file)) return known[file];
    std::map<size_t, std::string> &symbols = known[file];
    char line[4000], kind;
    FILE *pipe = popen(("nm --defined-only " + file + " 2>/dev/null").c_str(), "r");
    while (pipe && fgets(line, sizeof line, pipe)) {
        size_t address = 0;
        int name = 0;
        if (sscanf(line, "%zx %c %n", &address, &kind, &name) < 2 || !strchr("tTwW", kind)) continue;
        symbols[address].assign(line + name, strcspn(line + name, "\n"));
    }
    if (pipe) pclose(pipe);
    return symbols;
}

std::string symbol_name(const void *function) {
    Lock lock(big_lock);
    Dl_info information;
    if (!dladdr(function, &information)) return "";
    const std::map<size_t, std::string> &symbols = symbols_of(information.dli_fname);
    const auto found = symbols.find(
        (size_t)(static_cast<const char *>(function) - static_cast<const char *>(information.dli_fbase)));
    return found == symbols.end() ? "" : found->second;
}

std::string source_of(const void *pc) {
    if (!pc) return "an atomic or bulk copy";
    Lock lock(big_lock);
    const std::string line = look_up("", pc, 1); /* the call itself lies before the return address */
    const size_t slash = line.rfind('/'), note = line.find(" (");
    return line.substr(slash == std::string::npos ? 0 : slash + 1,
                       note == std::string::npos ? note : note - slash - 1);
}

} // namespace emu
