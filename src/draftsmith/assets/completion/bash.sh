# bash completion of draftsmith {{ version }}; print it anew after an update: draftsmith completion bash
_draftsmith() {
    local word=${COMP_WORDS[COMP_CWORD]} verb=${COMP_WORDS[1]} flag='' distance=0 index
    local options='' values='' kind='' many=''
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W '{{ verbs | map(attribute="name") | join(" ") }} --help --version' -- "$word"))
        return
    fi
    # bash splits --flag=value into three words
    [[ $word == '=' ]] && word=''
    for ((index = COMP_CWORD - 1; index > 1; index--)); do
        [[ ${COMP_WORDS[index]} == '=' ]] && continue
        distance=$((distance + 1))
        if [[ ${COMP_WORDS[index]} == --* ]]; then
            flag=${COMP_WORDS[index]}
            break
        fi
    done
    case $verb in
{%- for verb in verbs %}
    {{ verb.name }})
        options='{{ verb.options | map(attribute="name") | join(" ") }}'
        case $flag in
{%- for option in verb.options if option.takes != "nothing" %}
        {{ option.name }}) kind={{ option.takes }}{% if option.is_many %} many=1{% endif %}{% if option.values %} values='{{ option.values | join(" ") }}'{% endif %} ;;
{%- endfor %}
        esac
        if [[ -z $kind ]] || ((distance > 1)) && [[ -z $many ]]; then
            kind={{ verb.positional.takes }} values='{{ verb.positional.values | join(" ") }}'
        fi
        ;;
{%- endfor %}
    esac
    if [[ $word == -* || $kind == nothing ]]; then
        values=$options kind=words
    fi
    COMPREPLY=($(compgen -W "$values" -- "$word"))
    if [[ $kind == files ]]; then
        COMPREPLY+=($(compgen -f -- "$word"))
        compopt -o filenames 2>/dev/null
    fi
    return 0
}
complete -F _draftsmith draftsmith
