#include <stdint.h>
#include <string.h>

#include "kernels/kernels.h"

/* Reduced to |r| <= pi/4 by pi/2 in three parts: the first two have 22 bits, so their products
 * with the quotient (below 2^31) are exact; then Taylor series, exact far beyond a float. */
void sincos_exact(double angle, float *sine, float *cosine)
{
    const double magic = 0x1.8p52;
    double shifted = angle * 0x1.45f306dc9c883p-1 + magic; /* 2 / pi */
    double n = shifted - magic;
    uint64_t quadrant;
    memcpy(&quadrant, &shifted, sizeof quadrant);

    double r = angle - n * 0x1.921fb0p+0;
    r = r - n * 0x1.5110b0p-22;
    r = r - n * 0x1.18469898cc517p-44;

    static const double odd[] = { 1.0 / 6, 1.0 / 120, 1.0 / 5040, 1.0 / 362880, 1.0 / 39916800,
                                  1.0 / 6227020800.0, 1.0 / 1307674368000.0 };
    static const double even[] = { 1.0 / 2, 1.0 / 24, 1.0 / 720, 1.0 / 40320, 1.0 / 3628800,
                                   1.0 / 479001600, 1.0 / 87178291200.0, 1.0 / 20922789888000.0 };
    double z = r * r, s = odd[6], c = even[7];
    for (int i = 5; i >= 0; i--)
        s = odd[i] - z * s;
    for (int i = 6; i >= 0; i--)
        c = even[i] - z * c;
    s = r - r * (z * s);
    c = 1 - z * c;

    double sin_value = quadrant & 1 ? c : s, cos_value = quadrant & 1 ? s : c;
    *sine = (float)(quadrant & 2 ? -sin_value : sin_value);
    *cosine = (float)((quadrant + 1) & 2 ? -cos_value : cos_value);
}
