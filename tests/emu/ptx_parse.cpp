/* PTX as text: words, declarations, the outline of a module. */
#include "ptx_text.h"

#include <algorithm>
#include <cxxabi.h>

#include "exec.h"

namespace emu {
namespace ptx {

/* ---- words ---- */

void Scanner::skip_space() {
    for (; at < end; at++) {
        if (*at == '\n') line++;
        if (at + 1 < end && at[0] == '/' && at[1] == '/') {
            skip_line();
            at--;
        } else if (!isspace((unsigned char)*at)) {
            return;
        }
    }
}

bool is_word(char c) {
    return isalnum((unsigned char)c) || c == '_' || c == '$' || c == '%' || c == '.';
}

bool Scanner::next(std::string_view *token) {
    skip_space();
    if (at == end) return false;
    const char *begin = at;
    if (*at == '"') {
        for (at++; at < end && *at != '"'; at++) {
        }
        if (at < end) at++;
    } else if (is_word(*at)) {
        while (at < end && (is_word(*at) || (at + 2 < end && at[0] == ':' && at[1] == ':')))
            at += *at == ':' ? 2 : 1;
    } else {
        at++;
    }
    *token = std::string_view(begin, (size_t)(at - begin));
    return true;
}

Tokens tokens_of(std::string_view text) {
    Scanner scanner = { text.data(), text.data() + text.size(), 1 };
    Tokens tokens;
    for (std::string_view token; scanner.next(&token);) tokens.push_back(token);
    return tokens;
}

bool is_number(std::string_view token) {
    return !token.empty() && isdigit((unsigned char)token[0]);
}

uint64_t number_of(std::string_view token) {
    if (!is_number(token)) unknown("number " + text_of(token));
    const std::string text = text_of(token);
    const char kind = text.size() > 2 && text[0] == '0' ? (char)tolower(text[1]) : ' ';
    if (kind == 'f' || kind == 'd') return strtoull(text.c_str() + 2, nullptr, 16);
    return strtoull(text.c_str(), nullptr, 0);
}

Type type_named(const std::string &name) {
    static const std::map<std::string, Type> types = {
        { "pred", kPredicate }, { "b8", kB8 },         { "b16", kB16 }, { "b32", kB32 }, { "b64", kB64 },
        { "u8", kU8 },          { "u16", kU16 },       { "u32", kU32 }, { "u64", kU64 }, { "s8", kS8 },
        { "s16", kS16 },        { "s32", kS32 },       { "s64", kS64 }, { "f16", kF16 }, { "bf16", kBf16 },
        { "f16x2", kF16x2 },    { "bf16x2", kBf16x2 }, { "f32", kF32 }, { "f64", kF64 },
    };
    const auto found = types.find(name);
    return found == types.end() ? kNoType : found->second;
}

unsigned bytes_of(Type type) {
    switch (type) {
    case kB8:
    case kU8:
    case kS8: return 1;
    case kB16:
    case kU16:
    case kS16:
    case kF16:
    case kBf16: return 2;
    case kB64:
    case kU64:
    case kS64:
    case kF64: return 8;
    default: return 4;
    }
}

/* ---- declarations ---- */

Variable variable_of(const Tokens &tokens, size_t begin, size_t end) {
    Variable variable;
    size_t align = 0;
    bool of_pointee = false;
    for (size_t i = begin; i < end; i++) {
        const std::string_view token = tokens[i];
        if (token == ".ptr") {
            of_pointee = true;
        } else if (token == ".align" && i + 1 < end) {
            const size_t value = (size_t)number_of(tokens[++i]);
            if (!of_pointee) align = value;
        } else if (token[0] == '.' && type_named(text_of(token.substr(1))) != kNoType) {
            variable.bytes = bytes_of(type_named(text_of(token.substr(1))));
        } else if (token == "[" && i + 1 < end) {
            variable.bytes *= tokens[i + 1] == "]" ? 0 : (size_t)number_of(tokens[i + 1]);
            break;
        } else if (token[0] != '.') {
            variable.name = text_of(token);
            variable.alignment = align ? align : variable.bytes;
        }
    }
    return variable;
}

static std::vector<Variable> variables_of(const Tokens &tokens, size_t begin, size_t end) {
    std::vector<Variable> variables;
    for (size_t i = begin, from = begin; i <= end; i++) {
        if (i < end && tokens[i] != ",") continue;
        if (i > from) variables.push_back(variable_of(tokens, from, i));
        from = i + 1;
    }
    return variables;
}

size_t after_list(const Tokens &tokens, size_t open) {
    size_t i = open;
    while (i < tokens.size() && tokens[i] != ")") i++;
    return i + 1;
}

std::string title_of(const std::string &name) {
    const size_t begin = name.find("_Z");
    int status = -1;
    char *text = begin == std::string::npos
                     ? nullptr
                     : abi::__cxa_demangle(name.c_str() + begin, nullptr, nullptr, &status);
    std::string title = text ? text : name;
    free(text);
    const size_t parameters = title.find('(');
    if (parameters != std::string::npos && parameters > 0) title.erase(parameters);
    if (title.compare(0, 5, "void ") == 0) title.erase(0, 5);
    return title;
}

static unsigned product_of_numbers(const Tokens &tokens, size_t begin) {
    unsigned product = 1;
    for (size_t i = begin; i < tokens.size() && (is_number(tokens[i]) || tokens[i] == ","); i++)
        if (tokens[i] != ",") product *= (unsigned)number_of(tokens[i]);
    return product;
}

static void place_parameters(Function *function) {
    size_t offset = 0;
    for (Variable &parameter : function->parameters) {
        offset = align_up(offset, parameter.alignment);
        parameter.offset = offset;
        offset += parameter.bytes;
    }
    if (function->entry && offset > kMostArguments) unknown("arguments of more than 32764 bytes");
}

/* A function's header: results, name, parameters, limits. */
static Function function_of(std::string_view header) {
    const Tokens tokens = tokens_of(header);
    Function function;
    size_t i = 0;
    while (i < tokens.size() && tokens[i][0] == '.') function.entry |= tokens[i++] == ".entry";
    if (i < tokens.size() && tokens[i] == "(") {
        const size_t end = after_list(tokens, i);
        function.results = variables_of(tokens, i + 1, end - 1);
        i = end;
    }
    if (i == tokens.size()) unknown("function without a name");
    function.name = text_of(tokens[i++]);
    function.title = title_of(function.name);
    if (i < tokens.size() && tokens[i] == "(") {
        const size_t end = after_list(tokens, i);
        function.parameters = variables_of(tokens, i + 1, end - 1);
        i = end;
    }
    for (; i < tokens.size(); i++)
        if (tokens[i] == ".maxntid" || tokens[i] == ".reqntid")
            function.most_threads = product_of_numbers(tokens, i + 1);
    place_parameters(&function);
    return function;
}

/* ---- the outline of a module ---- */

struct Outline {
    Module &module;
    const char *at, *end;
    int line = 1;

    void read();
    void skip_body();
    void add_function(std::string_view header);
    void add_variable(std::string_view text);
    void add_data(const Variable &variable, const Tokens &tokens, size_t values);
};

static bool starts_with(const char *at, const char *end, const char *word) {
    const size_t length = strlen(word);
    return (size_t)(end - at) >= length && !memcmp(at, word, length);
}

/* Declarations end with a semicolon, functions with their bodies, and a few directives with their line. */
void Outline::read() {
    const char *begin = at;
    for (; at < end; at++) {
        if (*at == '\n') line++;
        const bool lone =
            *at == '.' && (starts_with(at, end, ".version") || starts_with(at, end, ".target") ||
                           starts_with(at, end, ".address_size") || starts_with(at, end, ".file"));
        if (lone || starts_with(at, end, "//")) {
            const bool nothing_before =
                std::all_of(begin, at, [](char c) { return isspace((unsigned char)c); });
            while (at < end && *at != '\n') at++;
            if (nothing_before) begin = at;
            at--;
            continue;
        }
        const std::string_view text(begin, (size_t)(at - begin));
        if (*at == ';') {
            add_variable(text);
            begin = at + 1;
        } else if (*at == '{' && text.find('=') != std::string_view::npos) {
            while (at < end && *at != '}') at++;
        } else if (*at == '{') {
            add_function(text);
            begin = at + 1;
        }
    }
}

/* From an opening brace to its counterpart. */
void Outline::skip_body() {
    int depth = 0;
    for (; at < end; at++) {
        if (*at == '\n') line++;
        if (starts_with(at, end, "//"))
            while (at + 1 < end && at[1] != '\n') at++;
        else if (*at == '{')
            depth++;
        else if (*at == '}' && --depth == 0)
            return;
    }
    unknown("a function that does not end");
}

void Outline::add_function(std::string_view header) {
    Function function = function_of(header);
    function.module = &module;
    function.line = line;
    function.begin = at + 1;
    skip_body();
    function.end = at;
    Function &kept = module.functions[function.name] = function;
    if (function.entry) module.entries[function.title] = &kept;
}

void Outline::add_variable(std::string_view text) {
    const Tokens tokens = tokens_of(text);
    const auto has = [&](const char *word) {
        return std::find(tokens.begin(), tokens.end(), word) != tokens.end();
    };
    if (tokens.empty() || has(".func") || has(".entry") || has(".alias")) return;
    const size_t equals = (size_t)(std::find(tokens.begin(), tokens.end(), "=") - tokens.begin());
    Variable variable = variable_of(tokens, 0, equals);
    if (has(".shared") && has(".extern")) {
        module.dynamic_name = variable.name;
    } else if (has(".shared")) {
        module.shared_end = align_up(module.shared_end, std::max<size_t>(16, variable.alignment));
        variable.offset = module.shared_end;
        module.shared_end = align_up(variable.offset + variable.bytes, 16) + kRedZone;
        module.shared[variable.name] = variable;
    } else if (has(".global") || has(".const")) {
        add_data(variable, tokens, equals + 1);
    }
}

void Outline::add_data(const Variable &variable, const Tokens &tokens, size_t values) {
    Data &data = module.data[variable.name];
    size_t width = variable.bytes, index = 0;
    for (const std::string_view token : tokens)
        if (token[0] == '.' && type_named(text_of(token.substr(1))) != kNoType)
            width = bytes_of(type_named(text_of(token.substr(1))));
    data.bytes = variable.bytes;
    data.words.assign(variable.bytes / 8 + 2, 0);
    bool negative = false;
    for (size_t i = values; i < tokens.size(); i++) {
        if (tokens[i] == "-") negative = true;
        if (!is_number(tokens[i]) && is_word(tokens[i][0]))
            data.wrong = "holds the address of " + text_of(tokens[i]);
        if (!is_number(tokens[i]) || (index + 1) * width > variable.bytes) continue;
        const uint64_t value = negative ? 0 - number_of(tokens[i]) : number_of(tokens[i]);
        memcpy(reinterpret_cast<char *>(data.words.data()) + index++ * width, &value, width);
        negative = false;
    }
}

bool read_module(Module *module, const std::string &path, const std::string &text) {
    module->path = path;
    module->text = text;
    module->shared_end = kDynamicOffset + kRedZone;
    module->code.emplace_back(); /* 0 is no instruction's place */
    Outline outline = { *module, module->text.data(), module->text.data() + module->text.size() };
    try {
        outline.read();
    } catch (const Unknown &what) {
        report("%s:%d: unknown %s", path.c_str(), outline.line, what.text.c_str());
        return false;
    }
    return true;
}

} // namespace ptx
} // namespace emu
