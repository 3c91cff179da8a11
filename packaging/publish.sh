#!/bin/sh
# What release.yml and renew.yml run on hosted runners besides make targets; the settings come from the runner:
#
#   packaging/publish.sh check         whether the tag $VERSION is ready; tells the workflow whether it is a prerelease
#   packaging/publish.sh prerequisites what packs an rpm and an MSI, and the Python that the MSI carries ($PYTHON_EMBED)
#   packaging/publish.sh try           packaging/try.sh in a container of $IMAGE, with the packages in dist/
#   packaging/publish.sh release       a release page with the changelog's section and all files of dist/
#   packaging/publish.sh index         sdist and wheel alone, in python/, for the action that uploads them
#   packaging/publish.sh image         the image to $IMAGE, signed without keys by cosign
#   packaging/publish.sh repository    an apt and an rpm repository with this and all earlier packages, signed with
#                                      the key in $SIGNING_KEY
#   packaging/publish.sh propose       the branch "renew" and a change of it, if the renewed pins differ
set -eu
cd "$(dirname "$0")/.."

is_prerelease() {
    case ${VERSION#v} in
        *[!0-9.]*) return 0 ;;
        *) return 1 ;;
    esac
}

case $1 in
    check)
        : "${IMAGE:?set the variable IMAGE: where the image is pushed to}"
        git merge-base --is-ancestor HEAD origin/main || {
            echo "publish.sh: $VERSION is not on main" >&2
            exit 1
        }
        values=packaging/helm/scheduled-events-agent/values.yaml
        grep -qxF "  repository: $IMAGE" "$values" || {
            echo "publish.sh: expected image.repository in $values to be $IMAGE" >&2
            exit 1
        }
        python3 packaging/release.py check "$VERSION"
        if is_prerelease; then prerelease=true; else prerelease=false; fi
        echo "prerelease=$prerelease" >>"$GITHUB_OUTPUT"
        ;;
    prerequisites)
        sudo apt-get update -q
        sudo apt-get install -qy --no-install-recommends \
            apt-utils binutils-mingw-w64-x86-64 createrepo-c gnupg msitools rpm wixl
        url=$(python3 -c 'import tomllib; print(tomllib.load(open("packaging/windows/python.toml", "rb"))["url"])')
        # The build refuses a file that has another hash than the one beside the address.
        curl --fail --location --silent --show-error --proto =https --output "$PYTHON_EMBED" "$url"
        ;;
    try)
        docker run --rm --volume "$PWD:/release:ro" "$IMAGE" /release/packaging/try.sh /release/dist
        ;;
    release)
        notes=$(mktemp)
        python3 packaging/release.py notes "$VERSION" >"$notes"
        set -- dist/*
        if is_prerelease; then set -- --prerelease "$@"; fi
        gh release create "$VERSION" --verify-tag --title "$VERSION" --notes-file "$notes" "$@"
        ;;
    index)
        mkdir python
        mv dist/*.whl dist/*.tar.gz python/
        ;;
    image)
        python3 packaging/release.py image
        # Where cosign looks for it too.
        export REGISTRY_AUTH_FILE="$HOME/.docker/config.json"
        mkdir -p "$HOME/.docker"
        podman login --username "$GITHUB_ACTOR" --password-stdin "${IMAGE%%/*}" <<EOF
$GH_TOKEN
EOF
        podman push --digestfile digest "scheduled-events-agent:${VERSION#v}" "$IMAGE:${VERSION#v}"
        # Not for a fix of an older minor version.
        if [ "$(gh release view --json tagName --jq .tagName)" = "$VERSION" ]; then
            podman push "scheduled-events-agent:${VERSION#v}" "$IMAGE:latest"
        fi
        cosign sign --yes "$IMAGE@$(cat digest)"
        ;;
    repository)
        older=$(mktemp -d)
        tags=$(gh release list --exclude-pre-releases --exclude-drafts --limit 1000 --json tagName --jq '.[].tagName')
        for tag in $tags; do
            [ "$tag" = "$VERSION" ] || gh release download "$tag" --dir "$older" --pattern '*.deb' --pattern '*.rpm'
        done
        key=$(mktemp)
        trap 'rm -f "$key"' EXIT
        printf '%s\n' "$SIGNING_KEY" >"$key"
        python3 packaging/repository.py --key "$key" --from "$older"
        ;;
    propose)
        git diff --quiet && exit 0
        git config user.name "renew"
        git config user.email "renew@users.noreply.github.com"
        git switch --create renew
        git commit --all --message "Renew the pinned wheels"
        git push --force origin renew
        [ "$(gh pr list --head renew --json number --jq length)" -gt 0 ] || gh pr create --fill --head renew
        ;;
    *)
        sed -n '2,14s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
esac
