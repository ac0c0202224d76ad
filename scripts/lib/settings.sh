# Shared by the scripts that train and score, after common.sh: what the variables of an experiment may be.

MECHANISM_NAMES=(esp lot set sinkhorn softmax) # the package's own list, which a fresh clone cannot be asked for

# each_of NAME CHOICE...: the words of the variable NAME, up to a colon, are among the choices, and none is there twice.
each_of() {
    local name=$1 words word own shared seen=" "
    shift
    read -rd '' -a words <<<"${!name:-$1}" || true
    [ ${#words[@]} -gt 0 ] || die "$name is blank; use $(sed 's/ /, /g' <<<"$*")"
    for word in "${words[@]}"; do
        one_of "$name" "${word%%:*}" "$@"
        [[ $word =~ ^[a-z_]+(:[A-Za-z0-9_]+)?$ ]] || die "$name: '$word' is neither NAME nor NAME:VARIANT"
        [[ $seen != *" $word "* ]] || die "$name: '$word' is there twice"
        own=${word^^}_OPTIONS own=${own/:/_} shared=${word%%:*} shared=${shared^^}_OPTIONS
        [[ $word != @(softmax|sinkhorn):@(pieces|calibrated) || ${!own:-${!shared:-}} == *--sinkhorn-learn-epsilon* ]] ||
            die "$name: ${word%%:*} has nothing to calibrate"
        seen+="$word "
    done
}

# each_seed: the words of SEEDS are whole numbers, and none is there twice.
each_seed() {
    local words word seen=" "
    read -rd '' -a words <<<"${SEEDS-1}" || true
    [ ${#words[@]} -gt 0 ] || die "SEEDS is blank; give whole numbers, as in '1 2 3 4'"
    for word in "${words[@]}"; do
        [[ $word =~ ^[0-9]+$ ]] || die "SEEDS: '$word' is not a whole number"
        [[ $seen != *" $word "* ]] || die "SEEDS: '$word' is there twice"
        seen+="$word "
    done
}

# check_settings: the variables of an experiment, as far as they are set, make sense.
check_settings() {
    local name numbers
    each_of MECHANISMS "${MECHANISM_NAMES[@]}"
    each_of BACKBONES transformer diff_transformer
    [[ ${BACKBONES:-} != *:* ]] || die "BACKBONES: a backbone has no variants, as in '$BACKBONES'"
    one_of BACKBONE "${BACKBONE:-transformer}" transformer diff_transformer
    one_of ATTENTION "${ATTENTION:-softmax}" "${MECHANISM_NAMES[@]}"
    one_of CALIBRATE "${CALIBRATE:-no}" pieces text no
    one_of SIZE "${SIZE:-small}" small iwslt_de_en
    one_of PROTOCOL "${PROTOCOL:-papers}" papers quick
    one_of FINETUNE_SCHEDULE "${FINETUNE_SCHEDULE:-fixed}" inverse_sqrt fixed
    one_of BEST "${BEST:-loss}" bleu loss
    one_of DEVICE "${DEVICE:-cpu}" cpu cuda
    one_of PRECISION "${PRECISION:-fp32}" fp32 fp16 bf16
    [ "${DEVICE:-}" != cpu ] || [ "${PRECISION:-fp32}" = fp32 ] || die "PRECISION is $PRECISION; on a CPU use fp32"
    numbers=(SEED EPOCHS FINETUNE_EPOCHS MAX_TOKENS WARMUP GPUS BEAM BATCH JOBS)
    [ "${PATIENCE:-none}" = none ] || numbers+=(PATIENCE)
    for name in "${numbers[@]}"; do
        [ -z "${!name:-}" ] || require_numbers "$name"
        [ "$name" = SEED ] || [[ ! ${!name:-} =~ ^0+$ ]] || die "$name=${!name} is too small; give at least 1"
    done
    each_seed
    [ "${LAMBDA_INIT:-}" = by-layer ] || [[ ${LAMBDA_INIT:-0} =~ ^[0-9]*\.?[0-9]+$ ]] \
        || die "LAMBDA_INIT=$LAMBDA_INIT is neither a number nor by-layer"
    for name in LR FINETUNE_LR DROPOUT; do
        [[ ${!name:-0} =~ ^[0-9]*\.?[0-9]+(e-?[0-9]+)?$ ]] || die "$name=${!name} is not a number"
    done
}

# label: OPTIONS and how the mechanism was calibrated, as results name a system.
label() {
    local how=
    case ${CALIBRATE:-no} in
        pieces) how="calibrated without data" ;;
        text) how=--calibrate ;;
        no) echo "${OPTIONS:-}" && return ;;
    esac
    echo "${OPTIONS:+$OPTIONS }$how${CALIBRATE_OPTIONS:+ $CALIBRATE_OPTIONS}"
}
