# fish completion of draftsmith {{ version }}; print it anew after an update: draftsmith completion fish
function __draftsmith_verb
    set -l words (commandline -opc)
    test "$words[2]" = "$argv[1]"
end
function __draftsmith_first
    test (count (commandline -opc)) = 1
end
# Whether the word being typed is a further value of an option that takes several.
function __draftsmith_within
    for word in (commandline -opc)[-1..3]
        if string match -q -- '--*' $word
            test "$word" = "$argv[1]"
            return
        end
    end
    return 1
end
complete -c draftsmith -f
complete -c draftsmith -n __draftsmith_first -l help -d 'what there is'
complete -c draftsmith -n __draftsmith_first -l version -d 'the version'
{%- for verb in verbs %}
complete -c draftsmith -n __draftsmith_first -a {{ verb.name }} -d {{ verb.about | fish }}
{%- set when = "-n '__draftsmith_verb " ~ verb.name ~ "'" %}
{%- if verb.positional.takes != "nothing" %}
complete -c draftsmith {{ when }}{% if verb.positional.takes == "files" %} -F{% endif %}{% if verb.positional.values %} -a '{{ verb.positional.values | join(" ") }}'{% endif %}
{%- endif %}
{%- for option in verb.options %}
complete -c draftsmith {{ when }} -l {{ option.name[2:] }}{% if option.takes == "files" %} -r -F{% elif option.takes == "words" %} -x{% endif %}{% if option.values %} -a '{{ option.values | join(" ") }}'{% endif %} -d {{ option.about | fish }}
{%- if option.is_many and (option.values or option.takes == "files") %}
complete -c draftsmith -n '__draftsmith_verb {{ verb.name }}; and __draftsmith_within {{ option.name }}'{% if option.takes == "files" %} -F{% endif %}{% if option.values %} -a '{{ option.values | join(" ") }}'{% endif %}
{%- endif %}
{%- endfor %}
{%- endfor %}
