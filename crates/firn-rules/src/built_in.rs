//! The built-in commit rules: for known programs, which files are one checkpoint and which change completes it.

/// The rules, one on each line, in the language of [`crate::parse_rules`].
pub const BUILT_IN: &str = "\
# name              scope                         commit                                 needs
hf                  checkpoint-*/                 close:trainer_state.json               rng_state*.pth=writers
hf-deepspeed        checkpoint-*/                 close:trainer_state.json               rng_state*.pth=writers
accelerate          checkpoint_*/                 idle                                   random_states_*.pkl=writers
lightning           checkpoints/                  idle                                   *.ckpt=1 last*.ckpt=renewed
lightning-fsdp      *.ckpt/                       close:meta.pt
dcp                 */                            rename:.metadata|__*.metadata          __*.distcp=writers begins=__*.distcp|.metadata*|__*.metadata*
torch-checkpointing tmp_*/                        rename:.
torchtitan          step-*/                       rename:.metadata                       __*.distcp=writers
megatron            iter_*/                       close:../latest_checkpointed_iteration.txt metadata.json=1
deepspeed           global_step*/                 close:../latest                        *_states.pt=writers
orbax               *.orbax-checkpoint-tmp*/      rename:.
nemo                {s}.ckpt/                     unlink:../{s}-unfinished
flashpoint          {s}_ckpt/                     unlink:../{s}_ckpt.*_unfinished
automodel           epoch_*_step_*/               rename:../LATEST
lammps              restart.{T}|restart.{T}.*|*.restart.{T} next                        T=integer
gromacs             {X}_step*.cpt|{X}_prev.cpt|{X}.cpt rename:{X}.cpt
openfoam            processor*/{T}/|{T}/          next                                   T=number
wrf                 wrfrst_d*_{DATE}              next
cesm                *.r.{DATE}.nc|rpointer.*.{DATE} next
openifs             srf{T}.*                      close:rcf                              *=same
namd                {X}.coor|{X}.vel|{X}.xsc|{X}.coor.old|{X}.vel.old|{X}.xsc.old next
quantum-espresso    {P}.save/                     close:../{P}.xml
flash               *_hdf5_chk_{N}|*_s*_hdf5_chk_{N} next                               N=integer
amrex               chk*.temp/                    rename:.
amrex-core          chk*/|plt*/                   next
chombo              *.hdf5                        idle
cp2k                {P}-1.restart|{P}-RESTART.wfn|{P}-1.restart.bak-*|{P}-RESTART.wfn.bak-* next
torch               *.pt|*.pth|*.ckpt             idle
";
