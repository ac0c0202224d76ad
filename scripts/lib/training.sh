# Shared by pretrain.sh and finetune.sh, after common.sh: one training run that can be stopped at any time.

# architecture BACKBONE SIZE: the fairseq --arch of a backbone.
architecture() {
    case $1 in
        transformer) echo "lot_transformer_$2" ;;
        diff_transformer) echo "diff_transformer_$2" ;;
        *) die "BACKBONE is '$1'; use transformer or diff_transformer" ;;
    esac
}

# device_flags: what fairseq needs for DEVICE and PRECISION; a GPU is used when there is one.
device_flags() {
    DEVICE=${DEVICE:-$(python -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')}
    case $DEVICE in
        cuda) PRECISION=${PRECISION:-fp16} ;;
        cpu)
            PRECISION=${PRECISION:-fp32}
            [ "$PRECISION" = fp32 ] || die "PRECISION is $PRECISION; on a CPU use fp32"
            # torch's large temporaries otherwise cause a page fault per 4 KiB on every update
            export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296 MALLOC_TOP_PAD_=268435456
            ;;
        *) die "DEVICE is '$DEVICE'; use cpu or cuda" ;;
    esac
    case $DEVICE.$PRECISION in
        cpu.fp32) DEVICE_FLAGS=(--cpu) ;;
        cuda.fp32) DEVICE_FLAGS=() ;;
        cuda.fp16 | cuda.bf16) DEVICE_FLAGS=("--$PRECISION") ;;
        *) die "PRECISION is '$PRECISION'; use fp32, fp16 or bf16" ;;
    esac
}

# train_once SAVE DATA FLAGS...: train into SAVE unless that has been done; resume what was stopped. Needs SRC and TGT.
train_once() {
    local save=$1 data=$2 log_format shared=--share-decoder-input-output-embed
    shift 2
    same_settings "$save" "$*"
    if [ -f "$save/finished" ]; then
        echo "$save is finished; remove it to train again"
        return
    fi
    device_flags
    if cmp -s "$data/dict.$SRC.txt" "$data/dict.$TGT.txt"; then shared=--share-all-embeddings; fi
    if [ ! -e "$save" ] || [ ! -f "$save.settings" ]; then
        put "$*" "$save.settings"
        mkdir -p "$save"
    fi
    if [ -t 2 ]; then log_format=tqdm; else log_format=simple; fi
    fairseq-train "$data" --user-dir fairseq_lot -s "$SRC" -t "$TGT" \
        "$shared" \
        --optimizer adam --adam-betas '(0.9, 0.98)' --weight-decay 0.0001 \
        --criterion label_smoothed_cross_entropy --label-smoothing 0.1 \
        --save-dir "$save" --no-epoch-checkpoints --log-file "$save/train.log" \
        --distributed-world-size "${GPUS:-1}" \
        --log-format "$log_format" --log-interval 100 "${DEVICE_FLAGS[@]}" "$@"
    touch "$save/finished"
    rm -f "$save/checkpoint_last.pt"
}

# device_name: what the scores were computed on, in words.
device_name() {
    if [ "$DEVICE" = cuda ]; then
        python -c 'import torch; print(torch.cuda.get_device_name())' | sed "s/\$/${GPUS:+, trained on $GPUS}/"
    else
        echo "CPU, threads: ${OMP_NUM_THREADS:-$(nproc)}"
    fi
}
