#compdef draftsmith
# zsh completion of draftsmith {{ version }}; print it anew after an update: draftsmith completion zsh
_draftsmith() {
    local word=${words[CURRENT]} verb=${words[2]} flag='' kind='' many='' index
    local -a verbs options values
    if ((CURRENT == 2)); then
        verbs=(
{%- for verb in verbs %}
            {{ (verb.name ~ ":" ~ verb.about) | quoted }}
{%- endfor %}
        )
        options=('--help:what there is' '--version:the version')
        _describe -t verbs verb verbs
        _describe -o option options
        return
    fi
    if [[ $word == --*=* ]]; then
        flag=${word%%=*} index=$((CURRENT - 1))
        compset -P '*='
        word=${word#*=}
    else
        for ((index = CURRENT - 1; index > 2; index--)); do
            if [[ ${words[index]} == --* ]]; then
                flag=${words[index]}
                break
            fi
        done
    fi
    case $verb in
{%- for verb in verbs %}
    ({{ verb.name }})
        options=(
{%- for option in verb.options %}
            {{ (option.name ~ ":" ~ option.about) | quoted }}
{%- endfor %}
        )
        case $flag in
{%- for option in verb.options if option.takes != "nothing" %}
        ({{ option.name }}) kind={{ option.takes }}{% if option.is_many %} many=1{% endif %}{% if option.values %} values=({{ option.values | join(" ") }}){% endif %} ;;
{%- endfor %}
        esac
        if [[ -z $kind ]] || ((index < CURRENT - 1)) && [[ -z $many ]]; then
            kind={{ verb.positional.takes }} values=({{ verb.positional.values | join(" ") }})
        fi
        ;;
{%- endfor %}
    esac
    if [[ $word == -* || $kind == nothing ]]; then
        _describe -o option options
        return
    fi
    (($#values)) && compadd -a values
    [[ $kind == files ]] && _files
}
if [[ $funcstack[1] == _draftsmith ]]; then
    _draftsmith "$@"
else
    compdef _draftsmith draftsmith
fi
