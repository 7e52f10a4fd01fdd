/* What the readers of PTX share: words and declarations. Private to tests/emu. */
#ifndef EMU_PTX_TEXT_H
#define EMU_PTX_TEXT_H

#include <string_view>

#include "ptx.h"

namespace emu {
namespace ptx {

typedef std::vector<std::string_view> Tokens;

inline std::string text_of(std::string_view token) {
    return std::string(token);
}

[[noreturn]] inline void unknown(const std::string &what) {
    throw Unknown{ what };
}

inline size_t align_up(size_t value, size_t alignment) {
    return (value + alignment - 1) / alignment * alignment;
}

/* Splits text into words, numbers and single characters. */
struct Scanner {
    const char *at, *end;
    int line;

    void skip_line() {
        while (at < end && *at != '\n') at++;
    }
    void skip_space();
    bool next(std::string_view *token);
};

bool is_word(char c);
bool is_number(std::string_view token);
/* The bits of a number: an integer, or a float or double in hexadecimal digits. */
uint64_t number_of(std::string_view token);
Tokens tokens_of(std::string_view text);
/* One variable: a space, an alignment, a type, a name, a number of elements. */
Variable variable_of(const Tokens &tokens, size_t begin, size_t end);
/* The place behind the matching parenthesis of the one at `open`. */
size_t after_list(const Tokens &tokens, size_t open);

} // namespace ptx
} // namespace emu

#endif
