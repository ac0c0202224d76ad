# Shared by reproduce_table.sh and its stages, after data.sh: the settings of the protocols, which stand here and
# nowhere else. What is set before the call keeps its value, and results say so.
#
#   PROTOCOL     papers  as ESPFormer trains (Table 12, appendix C.4): λ_init = 0, fine-tuning with pretraining's
#                        schedule, the best checkpoint by validation BLEU; SIZE=small is no model of the papers, so
#                        its learning rate and warm-up are its own
#                quick   shorter: λ_init by layer, fine-tuning at a constant rate, the best checkpoint by validation loss
#   EPOCHS, FINETUNE_EPOCHS, MAX_TOKENS, DROPOUT
#   PATIENCE     pretraining ends earlier when validation has not improved for so many epochs; none: it does not
#   LR, WARMUP   peak learning rate, 5e-4 as in fairseq's recipe for IWSLT'14 (Table 12 has 1e-4); its warm-up in updates
#   FINETUNE_LR  a tenth of LR;  FINETUNE_SCHEDULE: inverse_sqrt, with the same warm-up, or fixed
#   LAMBDA_INIT  λ_init of DiffTransformer: a number, or by-layer, 0.8 - 0.6 exp(-0.3 layer)
#   BEST         what the best checkpoint is chosen by: bleu or loss, both on the validation set

# use_protocol: set and export what is not set, for PROTOCOL and SIZE. PROTOCOL_LABEL is how results name it: the
# protocol and whatever differs from it.
use_protocol() {
    export PROTOCOL=${PROTOCOL:-papers}
    local epochs=25 finetune_epochs=10 dropout=0.3 lr=5e-4 warmup=4000 schedule=inverse_sqrt lambda_init=0 best=bleu
    if [ "$SIZE" = small ]; then
        dropout=0.1 lr=3e-3 warmup=800
    fi
    if [ "$PROTOCOL" = quick ]; then
        schedule=fixed lambda_init=by-layer best=loss
        [ "$SIZE" != small ] || epochs=7 finetune_epochs=2
    fi
    _differing=
    _setting EPOCHS "$epochs"
    _setting PATIENCE none
    _setting FINETUNE_EPOCHS "$finetune_epochs"
    _setting MAX_TOKENS 4096
    _setting DROPOUT "$dropout"
    _setting LR "$lr"
    _setting WARMUP "$warmup"
    _setting FINETUNE_LR "$(_tenth "$LR")"
    _setting FINETUNE_SCHEDULE "$schedule"
    _setting LAMBDA_INIT "$lambda_init"
    _setting BEST "$best"
    PROTOCOL_LABEL=$PROTOCOL${_differing:+,$_differing}
}

# _setting NAME VALUE: the variable NAME has this VALUE, or one of its own that differs.
_setting() {
    export "$1=${!1:-$2}"
    [ "${!1}" = "$2" ] || _differing+=" $1=${!1}"
}

# _tenth NUMBER: of 5e-4 it is 5e-5, of 0.002 it is 0.002e-1.
_tenth() {
    local exponent=0
    case $1 in
        *e-*) exponent=$((-10#${1#*e-})) ;; # 10#: 04 is no octal number
        *e*) exponent=$((10#${1#*e})) ;;
    esac
    echo "${1%%e*}e$((exponent - 1))"
}

# protocol_flags BACKBONE DATA: set PROTOCOL_FLAGS, what fairseq-train needs for BEST and LAMBDA_INIT.
protocol_flags() {
    PROTOCOL_FLAGS=()
    if [ "$1" = diff_transformer ] && [ "$LAMBDA_INIT" != by-layer ]; then
        PROTOCOL_FLAGS+=(--differential-lambda-init "$LAMBDA_INIT")
    fi
    if [ "$BEST" = bleu ]; then # as in fairseq's recipe for IWSLT'14
        find_languages "$2"
        PROTOCOL_FLAGS+=(--eval-bleu --eval-bleu-args '{"beam": 5, "max_len_a": 1.2, "max_len_b": 10}'
            --eval-bleu-detok moses --eval-bleu-detok-args "{\"target_lang\": \"$TGT\"}"
            --eval-bleu-remove-bpe "$(joining "$2")"
            --best-checkpoint-metric bleu --maximize-best-checkpoint-metric)
    fi
}
